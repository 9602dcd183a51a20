//! A process's mappings, and those of its pages that exist nowhere else.

use anyhow::{Context as _, Result, bail, ensure};
use orrery_kimage::{
    AddressSpace as KernelSpace, Entry, FileKind, Kernel, Mapping as KernelMapping, OpenFile, PageCensus,
    PageOwner, PageTables, Task,
};

use super::file_table::FileTable;
use super::open_file;
use crate::model::{AddressSpace, Backing, Mapping, MemoryLayout, PAGE, PageRange, PageRun, PageSource};

/// Fewer pages than these are copied sooner than they are asked for: 4 MiB.
const FEW: u64 = 1 << 10;
/// `VM_GROWSDOWN`, `VM_LOCKED`, `VM_UFFD_MISSING` and `VM_NORESERVE` of `include/linux/mm.h`.
const GROWS_DOWN: u64 = 0x100;
const LOCKED: u64 = 0x2000;
const UFFD_MISSING: u64 = 0x200;
const NO_RESERVE: u64 = 0x20_0000;
/// `VM_LOCKONFAULT`: pages are locked when they are touched.
const LOCK_ON_FAULT: u64 = 0x8_0000;
/// `VM_PFNMAP` and `VM_IO`: what the kernel maps for itself, which takes no advice.
const OF_THE_KERNEL: u64 = 0x400 | 0x4000;
/// Flags of mappings, and the advice of madvise(2) that sets them.
const ADVICE: [(u64, i32); 8] = [
    (0x8000, libc::MADV_SEQUENTIAL),
    (0x1_0000, libc::MADV_RANDOM),
    (0x2_0000, libc::MADV_DONTFORK),
    (0x200_0000, libc::MADV_WIPEONFORK),
    (0x400_0000, libc::MADV_DONTDUMP),
    (0x2000_0000, libc::MADV_HUGEPAGE),
    (0x4000_0000, libc::MADV_NOHUGEPAGE),
    (0x8000_0000, libc::MADV_MERGEABLE),
];

/// Reads the address space of a process.
pub(super) fn read<'k>(
    kernel: &Kernel,
    files: &mut FileTable<'k>,
    process: &Task<'k>,
    lazy: bool,
) -> Result<AddressSpace> {
    let space = process.address_space()?.context("it has no memory: a zombie, or a thread of the kernel")?;
    let mappings = space.mappings();
    if let Some(problem) = mappings.problems.first() {
        bail!("its mappings: {problem}");
    }
    if space.object().has("context.ldt") && space.object().u64("context.ldt")? != 0 {
        bail!("it has segments of its own (modify_ldt(2)), which are not carried over");
    }
    let executable = process.executable()?.context("it has no program")?;
    let mut found = Vec::new();
    for one in &mappings.found {
        found.push(mapping(files, one).with_context(|| format!("its mapping at {:#x}", one.start))?);
    }
    let mm = space.object();
    let range = |start, end| -> Result<(u64, u64)> { Ok((mm.u64(start)?, mm.u64(end)?)) };
    let layout = MemoryLayout {
        code: range("start_code", "end_code")?,
        data: range("start_data", "end_data")?,
        stack: mm.u64("start_stack")?,
        brk: range("start_brk", "brk")?,
        arguments: range("arg_start", "arg_end")?,
        environment: range("env_start", "env_end")?,
    };
    Ok(AddressSpace {
        layout,
        executable: files.add_program(&executable)?,
        auxv: auxiliary(&space)?,
        dumpable: i32::try_from(mm.u64("flags")? & 3)?,
        mappings: found,
        pages: pages(kernel, process, &space, &mappings.found, lazy)?,
    })
}

/// Returns the auxiliary vector up to and with its end.
fn auxiliary(space: &KernelSpace<'_>) -> Result<Vec<u64>> {
    let bytes = space.object().bytes("saved_auxv")?;
    let words: Vec<u64> =
        bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes)).collect();
    let pairs = words.chunks_exact(2).position(|pair| pair[0] == 0).unwrap_or(words.len() / 2 - 1);
    Ok(words[..(pairs + 1) * 2].to_vec())
}

fn mapping<'k>(files: &mut FileTable<'k>, mapping: &KernelMapping<'k>) -> Result<Mapping> {
    if mapping.flags & UFFD_MISSING != 0 {
        bail!("its pages come through a userfaultfd, and not all of them may have come");
    }
    let shared = mapping.is_shared();
    let backing = backing(files, mapping, shared)?;
    let mut flags = (if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE }).cast_unsigned();
    if mapping.flags & GROWS_DOWN != 0 {
        flags |= libc::MAP_GROWSDOWN.cast_unsigned();
    }
    if mapping.flags & NO_RESERVE != 0 {
        // More addresses than there can be memory, which is refused otherwise.
        flags |= libc::MAP_NORESERVE.cast_unsigned();
    }
    let locks_on_fault = mapping.flags & LOCKED != 0 && mapping.flags & LOCK_ON_FAULT != 0;
    if mapping.flags & LOCKED != 0 && !locks_on_fault {
        flags |= libc::MAP_LOCKED.cast_unsigned();
    }
    if !matches!(backing, Backing::File { .. } | Backing::Memfd { .. }) {
        flags |= libc::MAP_ANONYMOUS.cast_unsigned();
    }
    let protection = u32::try_from(mapping.flags & 7)?;
    let takes_advice =
        mapping.flags & OF_THE_KERNEL == 0 && !matches!(backing, Backing::Vdso | Backing::Vvar);
    let advice = ADVICE.iter().filter(|(flag, _)| takes_advice && mapping.flags & flag != 0);
    let advice = advice.fold(0, |all, (_, advice)| all | 1 << advice);
    let (start, end) = (mapping.start, mapping.end);
    Ok(Mapping { start, end, protection, flags, shared, advice, locks_on_fault, backing })
}

fn backing<'k>(files: &mut FileTable<'k>, mapping: &KernelMapping<'k>, shared: bool) -> Result<Backing> {
    let Some(file) = mapping.file()? else {
        ensure!(!shared, "it is shared memory of nothing that is known");
        return Ok(match mapping.label()?.as_deref() {
            Some("[vdso]") => Backing::Vdso,
            Some("[vvar]") => Backing::Vvar,
            Some("[heap]") => Backing::Heap,
            _ => Backing::Anonymous,
        });
    };
    let file = OpenFile::check(file)?;
    let path = file.path()?;
    let offset = mapping.page_offset * PAGE;
    if shared && is_shared_memory(&file)? {
        if is_system_v(&file)? {
            let remark = format!("System V memory at {:#x} has no number any more", mapping.start);
            files.remarks().add(remark);
        }
        return Ok(Backing::SharedMemory { inode: files.add_shared_memory(&file)?, offset });
    }
    let access = file.flags()? & libc::O_ACCMODE.cast_unsigned();
    if let Some(file) = open_file::add_memfd(files, &file)? {
        return Ok(Backing::Memfd { file, access, offset });
    }
    if file.kind()? != FileKind::Regular && path.bytes != b"/dev/zero" {
        bail!("it maps {}, which is no file", path.display());
    }
    let added = files.add_regular(&file).with_context(|| format!("it maps {}", path.display()));
    Ok(Backing::File { file: added?, access, offset })
}

/// Returns whether a mapped file is memory that processes share, without a name.
fn is_shared_memory(file: &OpenFile<'_>) -> Result<bool> {
    let path = file.path()?;
    let known = path.bytes == b"/dev/zero" || is_system_v(file)?;
    Ok(path.deleted && known && file.file_system()? == "tmpfs")
}

/// Returns whether it is System V shared memory: its content is carried over, and who shares it; its ID and key are not.
fn is_system_v(file: &OpenFile<'_>) -> Result<bool> {
    let path = file.path()?;
    Ok(path.deleted && path.bytes.starts_with(b"/SYSV"))
}

/// Returns whether criu lets pages of a mapping come later: `vma_entry_can_be_lazy` of `criu/include/vma.h`.
fn can_be_lazy(mapping: &KernelMapping<'_>) -> Result<bool> {
    Ok(mapping.file()?.is_none() && mapping.flags & LOCKED == 0)
}

/// Adds the pages of a mapping that only processes had, in ascending order. Pages with one of the addresses `needed` are not lazy.
fn add_own_pages(
    census: &mut PageCensus<'_>,
    mapping: &KernelMapping<'_>,
    tables: &PageTables<'_>,
    needed: &[u64],
    found: &mut Vec<PageRange>,
) -> Result<()> {
    let entries = mapping.pages(tables);
    if let Some(problem) = entries.problems.first() {
        bail!("its memory: {problem}");
    }
    let mapping_can = can_be_lazy(mapping)?;
    for entry in entries.found {
        let leaf = match entry {
            Entry::Page(leaf) => leaf,
            Entry::Swap { address, .. } => bail!("its page at {address:#x} is in swap"),
        };
        let used = census.of(leaf.physical)?;
        if used.owner != PageOwner::Anonymous {
            continue;
        }
        let (start, end) = (leaf.address.max(mapping.start), (leaf.address + leaf.size).min(mapping.end));
        let run =
            PageRun { address: start, physical: leaf.physical + (start - leaf.address), length: end - start };
        let lazy = mapping_can && used.alone && !needed.iter().any(|at| (start..end).contains(at));
        match found.last_mut() {
            Some(last) if last.lazy == lazy && last.run().is_some_and(|last| last.is_followed_by(&run)) => {
                last.length += run.length;
            }
            _ => found.push(PageRange {
                address: run.address,
                length: run.length,
                source: PageSource::Physical(run.physical),
                lazy,
            }),
        }
    }
    Ok(())
}

/// Returns all pages that only the process had, in ascending order; those that can be lazy are marked so.
pub(super) fn own_pages(
    kernel: &Kernel,
    process: &Task<'_>,
    space: &KernelSpace<'_>,
    mappings: &[KernelMapping<'_>],
) -> Result<Vec<PageRange>> {
    let tables = space.tables()?;
    let mut census = kernel.page_census()?;
    // A thread needs the top of its stack at once.
    let threads = process.threads().found;
    let stacks: Vec<u64> = threads.iter().filter_map(|thread| Some(thread.registers().ok()?.sp)).collect();
    let mut found = Vec::new();
    for mapping in mappings.iter().filter(|mapping| !mapping.is_shared()) {
        match mapping.label()?.as_deref() {
            Some("[vvar]") => {}
            // All processes have the same one, and the kernel has it whole.
            Some("[vdso]") => found.push(PageRange {
                address: mapping.start,
                length: mapping.end - mapping.start,
                source: PageSource::Kernel(kernel.variable("vdso_image_64", "vdso_image")?.u64("data")?),
                lazy: false,
            }),
            _ => add_own_pages(&mut census, mapping, &tables, &stacks, &mut found)?,
        }
    }
    Ok(found)
}

/// Returns the number of bytes that can be lazy.
pub(super) fn lazy_bytes(pages: &[PageRange]) -> u64 {
    pages.iter().filter(|range| range.lazy).map(|range| range.length).sum()
}

/// Returns whether it is worth while to let so many bytes arrive later.
pub(super) fn is_worth_being_lazy(bytes: u64) -> bool {
    bytes >= FEW * PAGE
}

/// Returns the pages of a process. None are lazy unless `lazy`, and unless it is worth while and possible.
fn pages(
    kernel: &Kernel,
    process: &Task<'_>,
    space: &KernelSpace<'_>,
    mappings: &[KernelMapping<'_>],
    lazy: bool,
) -> Result<Vec<PageRange>> {
    let mut pages = own_pages(kernel, process, space, mappings)?;
    let is_mapped = |range: &PageRange| {
        let Some(run) = range.run().filter(|_| range.lazy) else { return true };
        usize::try_from(run.length).is_ok_and(|length| kernel.memory().place(run.physical, length).is_some())
    };
    if !(lazy && is_worth_being_lazy(lazy_bytes(&pages)) && pages.iter().all(is_mapped)) {
        pages.iter_mut().for_each(|range| range.lazy = false);
    }
    for range in pages.iter().filter(|range| !range.lazy) {
        check(kernel, range).with_context(|| format!("its memory at {:#x}", range.address))?;
    }
    Ok(pages)
}

/// Makes sure that pages which the images will have can be read.
fn check(kernel: &Kernel, range: &PageRange) -> Result<()> {
    for offset in (0..range.length).step_by(4096) {
        match range.source {
            PageSource::Physical(address) => kernel.memory().read(address + offset, &mut [0])?,
            PageSource::Kernel(address) => kernel.read(address + offset, &mut [0])?,
        }
    }
    Ok(())
}
