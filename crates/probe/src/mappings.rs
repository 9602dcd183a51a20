//! Facilities that make, seal, hide, merge and drop memory.

use std::ffi::{CStr, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;

use linux_raw_sys::prctl::{PR_GET_MEMORY_MERGE, PR_SET_MEMORY_MERGE};
use rustix::fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous};
use rustix::process::getpid;
use syscalls::{Sysno, syscall};

use crate::child::{During, Note, Trouble, Verdict, expect};
use crate::facility::{Group, System};
use crate::row::{Family, Probe, Row};
use crate::tools::{PAGE, Pages, number_after, owned, read_file};

const HUGE_PAGE: usize = 2 << 20;

pub(crate) const FAMILY: Family = Family {
    group: Group::Memory,
    rows: &[
        Row {
            name: "memfd_seals",
            systems: &[System::LwcRollback, System::LwcContexts, System::Orbit, System::Orc, System::Hijack],
            purpose: "memory behind a descriptor that can be made immutable for good: images, objects, policies",
            fallback: "none: sharing without seals would let a holder change what others trust",
            probe: Probe::Child(memfd_seals),
        },
        Row {
            name: "seal_future_write",
            systems: &[System::Orbit, System::Orc, System::Hijack],
            purpose: "lets the maker of an object go on writing while everybody else may only read",
            fallback: "others get a descriptor that was opened again for reading only",
            probe: Probe::Child(seal_future_write),
        },
        Row {
            name: "seal_exec",
            systems: &[System::Orc, System::LwcContexts],
            purpose: "fixes whether an object may ever be executed",
            fallback: "the store checks the mode bits whenever it hands an object out",
            probe: Probe::Child(seal_exec),
        },
        Row {
            name: "memfd_secret",
            systems: &[System::LwcContexts],
            purpose: "keeps a vault's secrets out of the kernel's own mappings and of every other process' reach",
            fallback: "locked, undumpable memory in a process that no other process may trace",
            probe: Probe::Child(memfd_secret),
        },
        Row {
            name: "mseal",
            systems: &[System::Hijack, System::LwcContexts],
            purpose: "keeps a mapping (the executive, a context's code) from being unmapped, moved or re-protected",
            fallback: "the system-call filter refuses such calls on these addresses",
            probe: Probe::Child(mseal),
        },
        Row {
            name: "process_madvise",
            systems: &[System::Orbit],
            purpose: "ages the memory of an idle domain from outside, many ranges in one call",
            fallback: "an idle domain's memory is left to the kernel",
            probe: Probe::Child(process_madvise),
        },
        Row {
            name: "page_zero",
            systems: &[System::Hijack],
            purpose: "the zpoline-like trampoline at address zero, used only on explicit request",
            fallback: "none needed: call sites are rewritten without it",
            probe: Probe::Child(page_zero),
        },
        Row {
            name: "ksm",
            systems: &[System::Orc],
            purpose: "merging by scanning, the rival that sharing is measured against, and pages a tracker must stand",
            fallback: "the comparison leaves KSM out and says so",
            probe: Probe::Child(ksm),
        },
        Row {
            name: "ksm_whole_process",
            systems: &[System::Orc],
            purpose: "KSM for a program that never asked for it, in the same comparison",
            fallback: "only ranges advised one by one are merged",
            probe: Probe::Child(ksm_whole_process),
        },
        Row {
            name: "transparent_huge_pages",
            systems: &[System::LwcRollback, System::Orbit, System::Orc],
            purpose: "large areas cost one entry per 2 MiB when scanned, forked and mapped",
            fallback: "4 KiB pages: scans and forks take longer",
            probe: Probe::Child(transparent_huge_pages),
        },
        Row {
            name: "madvise_collapse",
            systems: &[System::Orc],
            purpose: "huge pages for code in memory files, whatever the machine's setting for shared memory is",
            fallback: "4 KiB pages: more faults at the start, more misses of the TLB",
            probe: Probe::Child(madvise_collapse),
        },
        Row {
            name: "hugetlb",
            systems: &[System::Orbit, System::Orc],
            purpose: "huge pages that are reserved ahead and so never fall apart",
            fallback: "transparent huge pages, else 4 KiB pages",
            probe: Probe::Child(hugetlb),
        },
    ],
};

fn sealable(name: &CStr) -> Result<OwnedFd, Trouble> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).during("memfd_create")?;
    ftruncate(&file, PAGE as u64).during("ftruncate")?;
    Ok(file)
}

/// Maps the first page of a file, shared.
fn share(file: &OwnedFd, access: ProtFlags) -> Result<*mut c_void, Errno> {
    // SAFETY: a fresh mapping at a place that the kernel chooses; the probe's child ends with it.
    unsafe { mmap(ptr::null_mut(), PAGE, access, MapFlags::SHARED, file, 0) }
}

fn memfd_seals(_: &mut Note) -> Verdict {
    let file = sealable(c"orrery-probe")?;
    rustix::io::write(&file, b"before").during("write")?;
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)
        .during("F_ADD_SEALS")?;
    expect(rustix::io::write(&file, b"after") == Err(Errno::PERM), "a sealed file can be written")?;
    expect(ftruncate(&file, 0) == Err(Errno::PERM), "a sealed file can be shrunk")?;
    expect(share(&file, ProtFlags::WRITE).is_err(), "a sealed file can be mapped for writing")
}

fn seal_future_write(_: &mut Note) -> Verdict {
    let file = sealable(c"orrery-probe")?;
    let ours = share(&file, ProtFlags::READ | ProtFlags::WRITE).during("mmap")?;
    fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).during("F_ADD_SEALS(F_SEAL_FUTURE_WRITE)")?;
    // SAFETY: the page is mapped for writing, and the seal leaves existing mappings alone.
    unsafe { ours.cast::<u8>().write_volatile(7) };
    let mut seen = [0; 1];
    rustix::io::pread(&file, &mut seen, 0).during("pread")?;
    expect(seen == [7], "the maker's own mapping was cut off")?;
    expect(share(&file, ProtFlags::WRITE) == Err(Errno::PERM), "a new mapping for writing is let through")
}

fn seal_exec(_: &mut Note) -> Verdict {
    let file = sealable(c"orrery-probe")?;
    fchmod(&file, Mode::RUSR | Mode::WUSR).during("fchmod")?;
    fcntl_add_seals(&file, SealFlags::EXEC).during("F_ADD_SEALS(F_SEAL_EXEC)")?;
    expect(fchmod(&file, Mode::RUSR | Mode::XUSR) == Err(Errno::PERM), "the sealed mode can be changed")
}

fn memfd_secret(note: &mut Note) -> Verdict {
    // SAFETY: it makes a descriptor, which is ours alone.
    let file = unsafe { owned(syscall!(Sysno::memfd_secret, libc::O_CLOEXEC)) }.during("memfd_secret")?;
    ftruncate(&file, PAGE as u64).during("ftruncate")?;
    let secret = share(&file, ProtFlags::READ | ProtFlags::WRITE).during("mmap (counts as locked memory)")?;
    // SAFETY: the page is mapped for writing.
    unsafe { secret.cast::<u8>().write_volatile(7) };
    let mut stolen = [0u8; 1];
    match read_through_kernel(secret, &mut stolen) {
        Err(Errno::FAULT) => note.say(format_args!("unreadable through process_vm_readv")),
        Ok(()) => return Err(Trouble::missing("process_vm_readv reads the secret")),
        Err(_) => note.say(format_args!("process_vm_readv not at hand to test it with")),
    }
    Ok(())
}

/// Reads a byte of this process the way another process would.
fn read_through_kernel(from: *mut c_void, into: &mut [u8; 1]) -> Result<(), Errno> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: from, iov_len: 1 };
    let me = getpid().as_raw_nonzero().get();
    // SAFETY: the kernel writes one byte to the borrowed buffer; a bad remote address gives an error.
    unsafe { syscall!(Sysno::process_vm_readv, me, &raw const local, 1, &raw const remote, 1, 0) }
        .map(drop)
        .map_err(|e| Errno::from_raw_os_error(e.into_raw()))
}

fn mseal(_: &mut Note) -> Verdict {
    let pages = Pages::small(1).during("mmap")?;
    // SAFETY: it only forbids changes to a page that is ours.
    unsafe { syscall!(Sysno::mseal, pages.at(0), PAGE, 0) }.during("mseal")?;
    expect(pages.protect(0, MprotectFlags::READ) == Err(Errno::PERM), "a sealed mapping can be re-protected")
}

fn process_madvise(note: &mut Note) -> Verdict {
    let pages = Pages::small(3).during("mmap")?;
    let me =
        rustix::process::pidfd_open(getpid(), rustix::process::PidfdFlags::empty()).during("pidfd_open")?;
    let advise = |advice: i32| {
        let range = |page| libc::iovec { iov_base: pages.at(page), iov_len: PAGE };
        let ranges = [range(0), range(2)];
        // SAFETY: the ranges are ours; dropping or ageing them makes no access unsound.
        unsafe { syscall!(Sysno::process_madvise, me.as_raw_fd(), ranges.as_ptr(), ranges.len(), advice, 0) }
    };
    (0..3).for_each(|page| pages.write(page, 1));
    advise(libc::MADV_COLD).during("process_madvise(MADV_COLD)")?;
    // Dropping is allowed on oneself only, and by newer kernels only.
    let drops =
        advise(libc::MADV_DONTNEED).is_ok() && [pages.read(0), pages.read(1), pages.read(2)] == [0, 1, 0];
    note.say(format_args!("{}", if drops { "ages and drops" } else { "ages, does not drop" }));
    Ok(())
}

fn page_zero(_: &mut Note) -> Verdict {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: nothing is at address zero in this child, or else MAP_FIXED_NOREPLACE fails; nothing is accessed.
    let zero = unsafe {
        mmap_anonymous(ptr::null_mut(), PAGE, access, MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE)
    }
    .during("mmap at 0 (vm.mmap_min_addr)")?;
    expect(zero.is_null(), "the page was mapped elsewhere")
}

fn ksm(note: &mut Note) -> Verdict {
    let pages = Pages::small(2).during("mmap")?;
    pages.advise(0, 2, Advice::LinuxMergeable).during("MADV_MERGEABLE")?;
    let mut run = [0; 8];
    match read_file(c"/sys/kernel/mm/ksm/run", &mut run) {
        Ok(b"1\n") => note.say(format_args!("scanner runs")),
        Ok(_) => note.say(format_args!("scanner stands still (/sys/kernel/mm/ksm/run)")),
        Err(_) => note.say(format_args!("scanner's switch cannot be read")),
    }
    Ok(())
}

fn ksm_whole_process(_: &mut Note) -> Verdict {
    // SAFETY: it lets the kernel merge equal pages, which the program cannot notice.
    unsafe { syscall!(Sysno::prctl, PR_SET_MEMORY_MERGE, 1, 0, 0, 0) }.during("PR_SET_MEMORY_MERGE")?;
    // SAFETY: the call takes no pointer and changes nothing.
    let merging =
        unsafe { syscall!(Sysno::prctl, PR_GET_MEMORY_MERGE, 0, 0, 0, 0) }.during("PR_GET_MEMORY_MERGE")?;
    expect(merging == 1, "the setting does not stick")
}

fn transparent_huge_pages(note: &mut Note) -> Verdict {
    let anonymous_huge_kib = || -> Result<u64, Trouble> {
        let mut text = [0; 2048];
        let text = read_file(c"/proc/self/smaps_rollup", &mut text).during("read /proc/self/smaps_rollup")?;
        number_after(text, b"AnonHugePages:")
            .ok_or(Trouble::missing("no AnonHugePages in /proc/self/smaps_rollup"))
    };
    let pages = Pages::with(2 * HUGE_PAGE, MapFlags::PRIVATE).during("mmap")?;
    pages.advise(0, 2 * HUGE_PAGE / PAGE, Advice::LinuxHugepage).during("MADV_HUGEPAGE")?;
    let before = anonymous_huge_kib()?;
    // A range of twice the size holds one aligned huge page, which one of the two writes meets.
    pages.write(0, 1);
    pages.write(HUGE_PAGE / PAGE, 1);
    expect(anonymous_huge_kib()? > before, "touched memory got small pages")?;
    let mut text = [0; 64];
    match read_file(c"/sys/kernel/mm/transparent_hugepage/enabled", &mut text) {
        Ok(mode) if mode.starts_with(b"[always]") => note.say(format_args!("always on")),
        _ => note.say(format_args!("on request (MADV_HUGEPAGE)")),
    }
    Ok(())
}

fn madvise_collapse(note: &mut Note) -> Verdict {
    let pages = Pages::with(2 * HUGE_PAGE, MapFlags::PRIVATE).during("mmap")?;
    // A range of twice the size holds one aligned huge page, which one of the two writes meets.
    pages.write(0, 1);
    pages.write(HUGE_PAGE / PAGE, 1);
    // SAFETY: it moves bytes from small pages to huge ones, which no access notices.
    let done = unsafe { syscall!(Sysno::madvise, pages.at(0), 2 * HUGE_PAGE, libc::MADV_COLLAPSE) };
    match done {
        Err(error) if [libc::ENOMEM, libc::EAGAIN, libc::EBUSY].contains(&error.into_raw()) => {
            note.say(format_args!("memory is in too many pieces just now"));
            Ok(())
        }
        other => other.during("madvise(MADV_COLLAPSE)").map(drop),
    }
}

fn hugetlb(_: &mut Note) -> Verdict {
    let pages = Pages::with(HUGE_PAGE, MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB)
        .during("mmap(MAP_HUGETLB) (vm.nr_hugepages)")?;
    pages.write(0, 1);
    expect(pages.read(0) == 1, "the page does not hold what was written")
}
