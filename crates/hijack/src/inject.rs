//! Puts an executive under a program that has just been executed.
//!
//! The program's thread stands at the end of its `execve`, before its first instruction. It is made to perform a few
//! system calls, with the `syscall` instruction that the kernel's vDSO contains: map room for the image, attach the
//! board, make code executable, take SIGSYS, arm dispatch. Then it has the registers back that the kernel gave it.

use std::fs;
use std::io;
use std::mem::offset_of;
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use libc::c_long;
use orrery_executive::board::Unfollowed;
use orrery_executive::config::{ACTION_FLAGS, Action, Config, RANGES, Range, service};

use crate::archive::Mounted;
use crate::image::Image;
use crate::policy::Policy;
use crate::segment::Segment;
use crate::tracee::{Stop, Tracee, read_memory, write_memory};

/// How the executive is to behave.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) counted: bool,
    pub(crate) timed: bool,
    pub(crate) patch: bool,
    pub(crate) threshold: u32,
    pub(crate) policy: Policy,
    /// What the policy's mounts lead to.
    pub(crate) mounted: Arc<[Mounted]>,
}

const PR_SET_SYSCALL_USER_DISPATCH: u64 = 59;
const ON: u64 = 1;
/// In no C library's headers yet; from Linux 6.10 on.
const SYS_MSEAL: c_long = 462;
const PAGE: u64 = 4096;
/// Nanoseconds by which timers may be late on purpose.
const SHORTEST_SLACK: u64 = 1;
/// How often a thread may stop on its way to a call.
const MOST_STOPS: usize = 1000;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Where the vDSO's `syscall` is looked for.
const VDSO_BYTES: usize = 8192;
/// What `cs` holds in 64-bit programs.
const LONG_MODE: u64 = 0x33;
const SIGSYS_BIT: u64 = 1 << (libc::SIGSYS - 1);

/// A thread that is made to perform system calls.
struct Puppet<'a> {
    tracee: &'a mut Tracee,
    registers: libc::user_regs_struct,
    gadget: u64,
    /// What to put back at `gadget`.
    covered: Option<u64>,
    /// It was to stop meanwhile.
    stopped: bool,
}

impl Puppet<'_> {
    fn run_to_call(&mut self) -> io::Result<()> {
        // What forces a signal on the thread would do so for ever.
        for _ in 0..MOST_STOPS {
            self.tracee.to_call()?;
            match self.tracee.wait() {
                Stop::Call => return Ok(()),
                Stop::Gone => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                // All others are blocked.
                Stop::Signal(libc::SIGSTOP) => self.stopped = true,
                _ => {}
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn call(&mut self, number: c_long, arguments: [u64; 6]) -> io::Result<u64> {
        let mut registers = self.registers;
        [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9] = arguments;
        registers.rax = number.cast_unsigned();
        registers.orig_rax = u64::MAX;
        registers.rip = self.gadget;
        self.tracee.set_registers(&registers)?;
        self.run_to_call()?;
        self.run_to_call()?;
        let result = self.tracee.registers()?.rax.cast_signed();
        if (-4095..0).contains(&result) {
            return Err(io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EIO)));
        }
        Ok(result.cast_unsigned())
    }
}

/// Puts an executive under the program that `tracee` has executed, and lets it go with this mask.
///
/// # Errors
/// Why not; the program then runs without.
pub(crate) fn inject(
    mut tracee: Tracee,
    mask: u64,
    image: &Image,
    segment: &Segment,
    settings: &Settings,
) -> Result<(), Unfollowed> {
    let result = prepare(&mut tracee, image, segment, settings);
    let gone = result.is_err() && tracee.registers().is_err();
    let _gone = tracee.set_mask(mask & !SIGSYS_BIT);
    let pid = tracee.pid();
    tracee.detach();
    if let Ok(true) = result {
        // SAFETY: stops a process that was to be stopped.
        unsafe { libc::kill(pid, libc::SIGSTOP) };
    }
    // Where the program was killed meanwhile, there is nobody to tell of.
    if gone { Ok(()) } else { result.map(drop) }
}

/// Whether the process was to be stopped meanwhile.
fn prepare(
    tracee: &mut Tracee,
    image: &Image,
    segment: &Segment,
    settings: &Settings,
) -> Result<bool, Unfollowed> {
    let failed = |_: io::Error| Unfollowed::Failed;
    let registers = tracee.registers().map_err(failed)?;
    if registers.cs != LONG_MODE {
        return Err(Unfollowed::Foreign);
    }
    let mut puppet = Puppet { tracee, registers, gadget: 0, covered: None, stopped: false };
    // To the end of the execve, which would overwrite rax.
    puppet.run_to_call().map_err(failed)?;
    puppet.registers = puppet.tracee.registers().map_err(failed)?;
    puppet.registers.orig_rax = u64::MAX;
    find_gadget(&mut puppet).map_err(failed)?;
    let arranged = arrange(&mut puppet, image, segment, settings);
    if let Some(word) = puppet.covered {
        puppet.tracee.exchange(puppet.gadget, word).map_err(failed)?;
    }
    puppet.tracee.set_registers(&puppet.registers).map_err(failed)?;
    arranged.map_err(failed)?;
    Ok(puppet.stopped)
}

/// A `syscall` instruction: the vDSO's, or one that lies over the program's first instruction meanwhile.
fn find_gadget(puppet: &mut Puppet<'_>) -> io::Result<()> {
    let pid = puppet.tracee.pid();
    if let Some(vdso) = auxiliary(pid, libc::AT_SYSINFO_EHDR)? {
        let mut bytes = vec![0; VDSO_BYTES];
        if read_memory(pid, vdso, &mut bytes).is_ok()
            && let Some(at) = bytes.windows(2).position(|pair| pair == SYSCALL)
        {
            puppet.gadget = vdso + at as u64;
            return Ok(());
        }
    }
    let at = puppet.registers.rip;
    let mut word = [0; 8];
    read_memory(pid, at, &mut word)?;
    word[..2].copy_from_slice(&SYSCALL);
    puppet.covered = Some(puppet.tracee.exchange(at, u64::from_le_bytes(word))?);
    puppet.gadget = at;
    Ok(())
}

fn auxiliary(pid: libc::pid_t, key: u64) -> io::Result<Option<u64>> {
    let bytes = fs::read(format!("/proc/{pid}/auxv"))?;
    let mut words = bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
    while let (Some(found), Some(value)) = (words.next(), words.next()) {
        if found == key {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// Whether programs may read `fs` without the kernel, and have the instruction that hashes it.
fn may_read_fs(pid: libc::pid_t) -> io::Result<bool> {
    /// `HWCAP2_FSGSBASE` of `asm/hwcap2.h`.
    const FSGSBASE: u64 = 1 << 1;
    let allowed = auxiliary(pid, libc::AT_HWCAP2)?.is_some_and(|bits| bits & FSGSBASE != 0);
    Ok(allowed && std::arch::is_x86_feature_detected!("sse4.2"))
}

/// What is put into the process: the image, and behind it the policy's table.
struct Load<'a> {
    image: &'a Image,
    program: Vec<u8>,
    table: Vec<u8>,
}

impl Load<'_> {
    fn table_length(&self) -> u64 {
        (self.table.len() as u64).next_multiple_of(PAGE)
    }

    fn length(&self) -> u64 {
        self.image.length + self.table_length()
    }
}

fn arrange(puppet: &mut Puppet<'_>, image: &Image, segment: &Segment, settings: &Settings) -> io::Result<()> {
    let program = fs::read_link(format!("/proc/{}/exe", puppet.tracee.pid()))?.into_os_string().into_vec();
    let table = settings.policy.table(&program, &settings.mounted);
    let load = Load { image, program, table };
    let protection = u64::try_from(libc::PROT_READ | libc::PROT_WRITE).unwrap_or(0);
    let flags = u64::try_from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).unwrap_or(0);
    let base = puppet.call(libc::SYS_mmap, [0, load.length(), protection, flags, u64::MAX, 0])?;
    let result = furnish(puppet, base, &load, segment, settings);
    if result.is_err() {
        puppet.call(libc::SYS_munmap, [base, load.length(), 0, 0, 0, 0])?;
    }
    result
}

fn furnish(
    puppet: &mut Puppet<'_>,
    base: u64,
    load: &Load<'_>,
    segment: &Segment,
    settings: &Settings,
) -> io::Result<()> {
    let image = load.image;
    let pid = puppet.tracee.pid();
    let ranges = code_ranges(pid)?;
    let user = user_of(pid)?;
    let id = u64::try_from(segment.id()).unwrap_or(0);
    let board = segment.lend(user, || puppet.call(libc::SYS_shmat, [id, 0, 0, 0, 0, 0]))?;
    let result = (|| {
        let (bytes, [handler, restorer]) = image.placed(base);
        write_memory(pid, base, &bytes)?;
        let config = base + image.config;
        let put = |offset: usize, value: &[u8]| write_memory(pid, config + offset as u64, value);
        let code = base + image.code.start;
        let code_length = image.code.end - image.code.start;
        let action = offset_of!(Config, action);
        for (offset, value) in [
            (offset_of!(Config, board), board),
            (offset_of!(Config, board_length), size_of_val(segment.board()) as u64),
            (offset_of!(Config, image), base),
            (offset_of!(Config, image_length), load.length()),
            (offset_of!(Config, policy), if load.table.is_empty() { 0 } else { base + image.length }),
            (offset_of!(Config, services), services(pid, settings)),
            (offset_of!(Config, code), code),
            (offset_of!(Config, code_length), code_length),
            (action + offset_of!(Action, handler), handler),
            (action + offset_of!(Action, flags), ACTION_FLAGS),
            (action + offset_of!(Action, restorer), restorer),
        ] {
            put(offset, &value.to_le_bytes())?;
        }
        put(offset_of!(Config, counted), &[u8::from(settings.counted)])?;
        put(offset_of!(Config, own_counters), &[u8::from(may_read_fs(pid)?)])?;
        put(offset_of!(Config, timed), &[u8::from(settings.timed)])?;
        put(offset_of!(Config, unpatched), &[u8::from(!settings.patch)])?;
        put(offset_of!(Config, threshold), &settings.threshold.to_le_bytes())?;
        for (index, (start, end, file)) in ranges.into_iter().take(RANGES).enumerate() {
            let at = offset_of!(Config, ranges) + index * size_of::<Range>();
            let marks = settings.policy.marks(&load.program, file.as_bytes());
            for (offset, value) in [
                (offset_of!(Range, start), start),
                (offset_of!(Range, end), end),
                (offset_of!(Range, marks), marks),
            ] {
                put(at + offset, &value.to_le_bytes())?;
            }
        }
        write_memory(pid, base + image.length, &load.table)?;
        let read_only = u64::try_from(libc::PROT_READ).unwrap_or(0);
        let executable = u64::try_from(libc::PROT_READ | libc::PROT_EXEC).unwrap_or(0);
        puppet.call(libc::SYS_mprotect, [code, code_length, executable, 0, 0, 0])?;
        for (start, length) in [(base, image.code.start), (base + image.length, load.table_length())] {
            if length > 0 {
                puppet.call(libc::SYS_mprotect, [start, length, read_only, 0, 0, 0])?;
            }
        }
        if settings.policy.services().sleep.is_some() {
            let option = u64::try_from(libc::PR_SET_TIMERSLACK).unwrap_or(0);
            puppet.call(libc::SYS_prctl, [option, SHORTEST_SLACK, 0, 0, 0, 0])?;
        }
        let signal = u64::try_from(libc::SIGSYS).unwrap_or(0);
        let action = config + action as u64;
        puppet.call(libc::SYS_rt_sigaction, [signal, action, 0, 8, 0, 0])?;
        // The last call but one: nothing can be undone any more, and armed dispatch would have it delivered. Kernels before
        // 6.10 cannot: then the executive alone keeps the program from changing these mappings.
        let _older = puppet.call(SYS_MSEAL, [base, load.length(), 0, 0, 0, 0]);
        let dispatch = [PR_SET_SYSCALL_USER_DISPATCH, ON, code, code_length, 0, 0];
        puppet.call(libc::SYS_prctl, dispatch)?;
        segment.board().followed.fetch_add(1, Relaxed);
        Ok(())
    })();
    if result.is_err() {
        puppet.call(libc::SYS_shmdt, [board, 0, 0, 0, 0, 0])?;
    }
    result
}

/// Which services are on in a process: numbers of users may change where nobody has said yet what they are in its namespace.
fn services(pid: libc::pid_t, settings: &Settings) -> u64 {
    let mapped = |name: &str| fs::read(format!("/proc/{pid}/{name}")).is_ok_and(|map| !map.is_empty());
    let bits = settings.policy.services().bits();
    if mapped("uid_map") && mapped("gid_map") { bits } else { bits & !service::USER }
}

/// What the kernel mapped to be executed: the program, and its loader.
fn code_ranges(pid: libc::pid_t) -> io::Result<Vec<(u64, u64, String)>> {
    let maps = fs::read(format!("/proc/{pid}/maps"))?;
    Ok(String::from_utf8_lossy(&maps).lines().filter_map(code_range).collect())
}

/// Start, end and file of a mapping of code.
fn code_range(line: &str) -> Option<(u64, u64, String)> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let (permissions, inode) = (words.next()?, words.nth(2)?);
    let file = words.next().unwrap_or("").trim_start();
    let number = |text| u64::from_str_radix(text, 16).ok();
    (permissions == "r-xp" && inode != "0").then_some((number(start)?, number(end)?, file.to_owned()))
}

/// The effective user of a process.
fn user_of(pid: libc::pid_t) -> io::Result<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let user = line.and_then(|line| line.split_ascii_whitespace().nth(1)).and_then(|user| user.parse().ok());
    user.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_told_from_other_mappings() {
        let line = "7f12-7f34 r-xp 00001000 fe:00 1234                       /usr/bin/x y";
        assert_eq!(code_range(line), Some((0x7f12, 0x7f34, "/usr/bin/x y".to_owned())));
        assert_eq!(code_range(&line.replace("r-xp", "rwxp")), None);
        assert_eq!(code_range("7f12-7f34 r-xp 00000000 00:00 0    [vdso]"), None);
        assert_eq!(code_range(""), None);
    }

    #[test]
    fn this_processs_own_code_and_user_are_found() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(!code_ranges(own).unwrap().is_empty());
        // SAFETY: asks for a number.
        assert_eq!(user_of(own).unwrap(), unsafe { libc::geteuid() });
        assert!(auxiliary(own, libc::AT_PAGESZ).unwrap() == Some(4096));
    }
}
