//! Puts an executive under a program that has just been executed.
//!
//! The program's thread stands at the end of its `execve`, before its first instruction. It is made to perform two
//! system calls, with the `syscall` instruction that the kernel's vDSO contains: map room for the image, attach its
//! code there (see [`crate::code`]; where that is copied, make it executable). The image's data, its settings and the
//! policy's table are written at once. Then the thread runs the image's own beginning, which attaches the page, takes
//! SIGSYS and arms dispatch, and sends itself a signal when it is done. It has the registers back then that the kernel
//! gave it.
//!
//! Each stop costs two changes between processes, and each look into `/proc` some microseconds, for every program that
//! is executed. So there are few of them: when it has executed the program, at the end of that call, behind each of the
//! two calls, and at the signal. The kernel stops a thread behind a call by a SIGTRAP which it forces on it, and so
//! makes a thread that ignores the signal (handlers are gone by then) receive it from then on. Who ignores it is
//! stopped before its calls, too, which needs no signal.

use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::mem::offset_of;
use std::os::unix::ffi::OsStringExt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use libc::c_long;
use orrery_hijack_image::config::{ACTION_FLAGS, Action, Config, RANGES, Range, service};
use orrery_hijack_image::shared_page::{SharedPage, Unfollowed};

use crate::archive::Mounted;
use crate::image::{Image, PAGE};
use crate::maps::Maps;
use crate::policy::{Policy, Strictness};
use crate::shared_code::{self, SharedCode};
use crate::shared_segment::{SharedSegment, UserMemory};
use crate::unfollowed;
use orrery_sys::process_memory;
use orrery_sys::ptrace::{Stop, Tracee};

/// How the executive is to behave.
#[derive(Debug)]
pub(crate) struct Settings {
    /// The image's code, where tracees may share it.
    pub(crate) code: Option<Arc<SharedCode>>,
    pub(crate) counted: bool,
    pub(crate) timed: bool,
    pub(crate) patch: bool,
    pub(crate) threshold: u32,
    pub(crate) policy: Policy,
    /// What becomes of programs to which the policy cannot be applied.
    pub(crate) strictness: Strictness,
    /// What the policy's mounts lead to.
    pub(crate) mounted: Arc<[Mounted]>,
    /// The policy's tables that were made so far.
    pub(crate) tables: Tables,
}

/// Tables of a policy, by the rules that are in them: which of them a program has depends on its name.
#[derive(Debug, Default)]
pub(crate) struct Tables(Mutex<HashMap<Vec<bool>, Arc<[u8]>>>);

impl Tables {
    fn get(&self, settings: &Settings, program: &[u8]) -> Arc<[u8]> {
        let concerned = settings.policy.concerned(program);
        let mut tables = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let make = || settings.policy.table(program, &settings.mounted, settings.strictness).into();
        Arc::clone(tables.entry(concerned).or_insert_with(make))
    }
}

/// How often a thread may stop on its way to a call.
const MOST_STOPS: usize = 1000;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Where the vDSO's `syscall` is looked for.
const VDSO_BYTES: usize = 4096;
/// What a function may use below a stack pointer that it was not called with.
const BELOW: u64 = 256;
/// What `cs` holds in 64-bit programs.
const LONG_MODE: u64 = 0x33;
const SIGSYS_BIT: u64 = 1 << (libc::SIGSYS - 1);

/// The memory that a program is to share with the supervisor, unless it acts as another user.
pub(crate) struct Home<'a> {
    pub(crate) segment: &'a SharedSegment,
    /// Whose it is, among the users.
    pub(crate) user: usize,
    pub(crate) page: &'a SharedPage,
    /// Finds whose a process's memory is to be.
    pub(crate) user_of: &'a dyn Fn(libc::pid_t) -> Option<(usize, Arc<UserMemory>)>,
}

/// A thread that is made to perform system calls.
struct Puppet<'a> {
    tracee: &'a mut Tracee,
    registers: libc::user_regs_struct,
    gadget: u64,
    /// What to put back at `gadget`.
    covered: Option<u64>,
    /// The mask that the program is to begin with.
    mask: u64,
    /// It may be stopped by SIGTRAP.
    trappable: bool,
    /// Signals that it was sent meanwhile, and is to have afterwards: those of [`LATE`].
    late: [bool; LATE.len()],
}

/// Signals that may arrive: what cannot be blocked, and what is not any more once the kernel has forced it.
const LATE: [libc::c_int; 2] = [libc::SIGTRAP, libc::SIGSTOP];

impl Puppet<'_> {
    fn run_to_call(&mut self) -> io::Result<()> {
        // What forces a signal on the thread would do so for ever.
        for _ in 0..MOST_STOPS {
            self.tracee.resume_to_syscall(0)?;
            match self.tracee.wait_over_exec() {
                Stop::Call => return Ok(()),
                Stop::Gone => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                // All others are blocked.
                Stop::Signal(signal) => {
                    let _blocked = self.is_late(signal);
                }
                _ => {}
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Lets it make the call that it stands at.
    fn step_over_call(&mut self) -> io::Result<()> {
        let behind = self.gadget + SYSCALL.len() as u64;
        for _ in 0..MOST_STOPS {
            self.tracee.step()?;
            match self.tracee.wait_over_exec() {
                Stop::Signal(libc::SIGTRAP) if self.tracee.registers()?.rip == behind => return Ok(()),
                Stop::Gone => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                Stop::Signal(signal) if self.is_late(signal) => {}
                // What is not blocked is forced: a filter of the program's does not let it call.
                Stop::Signal(_) => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
                _ => {}
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Whether a signal can be one that was sent; it is kept for later then.
    fn is_late(&mut self, signal: libc::c_int) -> bool {
        let place = LATE.iter().position(|late| *late == signal).and_then(|index| self.late.get_mut(index));
        place.map(|place| *place = true).is_some()
    }

    fn call(&mut self, number: c_long, arguments: [u64; 6]) -> io::Result<u64> {
        let mut registers = self.registers;
        [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9] = arguments;
        registers.rax = number.cast_unsigned();
        registers.orig_rax = u64::MAX;
        registers.rip = self.gadget;
        self.tracee.set_registers(&registers)?;
        if self.trappable {
            self.step_over_call()?;
        } else {
            self.run_to_call()?;
            self.run_to_call()?;
        }
        let result = self.tracee.registers()?.rax.cast_signed();
        if (-4095..0).contains(&result) {
            return Err(io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EIO)));
        }
        Ok(result.cast_unsigned())
    }

    /// Runs a function that ends with SIGSYS, and its result in rbx. Its third argument is the program's stack pointer.
    fn run(&mut self, function: u64, [first, second]: [u64; 2]) -> io::Result<()> {
        let mut registers = self.registers;
        (registers.rdi, registers.rsi, registers.rdx) = (first, second, registers.rsp);
        registers.rip = function;
        registers.rsp = registers.rsp.wrapping_sub(BELOW) & !15;
        registers.orig_rax = u64::MAX;
        self.tracee.set_registers(&registers)?;
        for _ in 0..MOST_STOPS {
            self.tracee.resume(0);
            match self.tracee.wait_over_exec() {
                Stop::Signal(libc::SIGSYS) => {
                    let result = self.tracee.registers()?.rbx.cast_signed();
                    let error = i32::try_from(-result).unwrap_or(libc::EIO);
                    return if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) };
                }
                Stop::Gone => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                Stop::Signal(signal) if self.is_late(signal) => {}
                // What is not blocked is forced: the image does not run here.
                Stop::Signal(_) => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
                _ => {}
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }
}

/// Puts an executive under the program that `tracee` has executed, and lets it go with this mask. `trappable` says that
/// it does not ignore SIGTRAP.
///
/// Returns whether the thread was certainly detached. Where there is no executive, that is counted, and the program
/// runs without.
pub(crate) fn inject(
    mut tracee: Tracee,
    (mask, trappable): (u64, bool),
    image: &Image,
    home: &Home<'_>,
    settings: &Settings,
) -> bool {
    let result = prepare(&mut tracee, (mask, trappable), image, home, settings);
    let gone = result.is_err() && tracee.registers().is_err();
    let pid = tracee.pid();
    // Where the program was killed meanwhile, there is nothing to report.
    if let Err(reason) = result
        && !gone
    {
        // Before the program goes on: it may be the run's last, after which the counts are read.
        if let Some(counter) = home.page.unfollowed.get(reason as usize) {
            counter.fetch_add(1, Relaxed);
        }
        unfollowed::deal_with(pid, reason, &settings.policy, settings.strictness);
    }
    let _gone = tracee.set_mask(mask & !SIGSYS_BIT);
    let detached = tracee.detach();
    for (signal, late) in LATE.into_iter().zip(result.unwrap_or_default()) {
        if late {
            // SAFETY: sends a process what it was sent.
            unsafe { libc::kill(pid, signal) };
        }
    }
    detached
}

/// Which signals the process was sent meanwhile.
fn prepare(
    tracee: &mut Tracee,
    (mask, trappable): (u64, bool),
    image: &Image,
    home: &Home<'_>,
    settings: &Settings,
) -> Result<[bool; LATE.len()], Unfollowed> {
    let failed = |_: io::Error| Unfollowed::Failed;
    let registers = tracee.registers().map_err(failed)?;
    if registers.cs != LONG_MODE {
        return Err(Unfollowed::Foreign);
    }
    let mut puppet =
        Puppet { tracee, registers, gadget: 0, covered: None, mask, trappable, late: [false; LATE.len()] };
    // To the end of the execve, which would overwrite rax.
    puppet.run_to_call().map_err(failed)?;
    puppet.registers = puppet.tracee.registers().map_err(failed)?;
    puppet.registers.orig_rax = u64::MAX;
    let maps = Maps::of(puppet.tracee.pid()).map_err(failed)?;
    find_gadget(&mut puppet, &maps).map_err(failed)?;
    let arranged = arrange(&mut puppet, &maps, image, home, settings);
    if let Some(word) = puppet.covered {
        puppet.tracee.replace_word(puppet.gadget, word).map_err(failed)?;
    }
    puppet.tracee.set_registers(&puppet.registers).map_err(failed)?;
    arranged.map_err(failed)?;
    Ok(puppet.late)
}

/// A `syscall` instruction: the vDSO's, or one that lies over the program's first instruction meanwhile.
fn find_gadget(puppet: &mut Puppet<'_>, maps: &Maps) -> io::Result<()> {
    /// Where it is in the vDSO, which is the same for all programs.
    static OFFSET: OnceLock<Option<u64>> = OnceLock::new();
    let pid = puppet.tracee.pid();
    if let Some(vdso) = maps.vdso {
        let look = || {
            let mut bytes = vec![0; VDSO_BYTES];
            process_memory::read(pid, vdso, &mut bytes).ok()?;
            Some(bytes.windows(2).position(|pair| pair == SYSCALL)? as u64)
        };
        if let Some(offset) = *OFFSET.get_or_init(look) {
            puppet.gadget = vdso + offset;
            return Ok(());
        }
    }
    let at = puppet.registers.rip;
    let mut word = [0; 8];
    process_memory::read(pid, at, &mut word)?;
    word[..2].copy_from_slice(&SYSCALL);
    puppet.covered = Some(puppet.tracee.replace_word(at, u64::from_le_bytes(word))?);
    puppet.gadget = at;
    Ok(())
}

/// Whether programs may read `fs` without the kernel, and have the instruction that hashes it.
fn may_read_fs() -> bool {
    /// `HWCAP2_FSGSBASE` of `asm/hwcap2.h`.
    const FSGSBASE: u64 = 1 << 1;
    // SAFETY: the call takes no pointer.
    let allowed = unsafe { libc::getauxval(libc::AT_HWCAP2) } & FSGSBASE != 0;
    allowed && std::arch::is_x86_feature_detected!("sse4.2")
}

/// Where a signal frame has PKRU, from the beginning of the extended state in it; zero where the kernel uses no
/// protection keys.
fn protection_keys() -> u32 {
    /// `OSPKE` in leaf 7: the kernel has switched them on.
    const OSPKE: u32 = 1 << 4;
    const EXTENDED_STATE: u32 = 0xd;
    const PKRU: u32 = 9;
    // A hypervisor is asked each time.
    static OFFSET: OnceLock<u32> = OnceLock::new();
    *OFFSET.get_or_init(|| {
        let has = __cpuid(0).eax >= EXTENDED_STATE && __cpuid_count(7, 0).ecx & OSPKE != 0;
        if has { __cpuid_count(EXTENDED_STATE, PKRU).ebx } else { 0 }
    })
}

/// What is put into the process: the image, and behind it the policy's table.
struct Load<'a> {
    image: &'a Image,
    program: Vec<u8>,
    table: Arc<[u8]>,
}

impl<'a> Load<'a> {
    fn new(pid: libc::pid_t, image: &'a Image, settings: &Settings) -> io::Result<Self> {
        // Where nobody asks for it, its name is not looked for.
        let named = settings.policy.asks_for_programs();
        let program = if named {
            fs::read_link(format!("/proc/{pid}/exe"))?.into_os_string().into_vec()
        } else {
            Vec::new()
        };
        let table = settings.tables.get(settings, &program);
        Ok(Self { image, program, table })
    }

    fn length(&self) -> u64 {
        self.image.length + (self.table.len() as u64).next_multiple_of(PAGE)
    }
}

fn arrange(
    puppet: &mut Puppet<'_>,
    maps: &Maps,
    image: &Image,
    home: &Home<'_>,
    settings: &Settings,
) -> io::Result<()> {
    let load = Load::new(puppet.tracee.pid(), image, settings)?;
    let protection = u64::try_from(libc::PROT_READ | libc::PROT_WRITE).unwrap_or(0);
    let flags = u64::try_from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).unwrap_or(0);
    let base = puppet.call(libc::SYS_mmap, [0, load.length(), protection, flags, u64::MAX, 0])?;
    let result = furnish(puppet, base, maps, &load, home, settings);
    if result.is_err() {
        puppet.call(libc::SYS_munmap, [base, load.length(), 0, 0, 0, 0])?;
    }
    result
}

fn furnish(
    puppet: &mut Puppet<'_>,
    base: u64,
    maps: &Maps,
    load: &Load<'_>,
    home: &Home<'_>,
    settings: &Settings,
) -> io::Result<()> {
    let image = load.image;
    let pid = puppet.tracee.pid();
    let config = usize::try_from(image.config).unwrap_or(0);
    let ranges = maps.code.get(..maps.code.len().min(RANGES)).unwrap_or_default();
    let end = config + offset_of!(Config, ranges) + size_of::<Range>() * ranges.len();
    let (mut bytes, entries) = image.placed(base, end);
    let mut put = |offset: usize, value: &[u8]| {
        if let Some(place) = bytes
            .get_mut(config + offset - image.fixed().len()..)
            .and_then(|rest| rest.get_mut(..value.len()))
        {
            place.copy_from_slice(value);
        }
    };
    let code = base + image.code.start;
    let code_length = image.code.end - image.code.start;
    let action = offset_of!(Config, action);
    for (offset, value) in [
        (offset_of!(Config, verdicts_segment), u64::try_from(home.segment.verdicts_id()).unwrap_or(0)),
        (offset_of!(Config, image), base),
        (offset_of!(Config, image_length), load.length()),
        (offset_of!(Config, policy), if load.table.is_empty() { 0 } else { base + image.length }),
        (offset_of!(Config, services), services(pid, settings)),
        (offset_of!(Config, code), code),
        (offset_of!(Config, code_length), code_length),
        (action + offset_of!(Action, handler), entries.handler),
        (action + offset_of!(Action, flags), ACTION_FLAGS),
        (action + offset_of!(Action, restorer), entries.restorer),
    ] {
        put(offset, &value.to_le_bytes());
    }
    for (offset, flag) in [
        (offset_of!(Config, logged), settings.policy.tells()),
        (offset_of!(Config, counted), settings.counted),
        (offset_of!(Config, thread_counters_enabled), may_read_fs()),
        (offset_of!(Config, timed), settings.timed),
        (offset_of!(Config, rewriting_disabled), !settings.patch),
        (offset_of!(Config, sigsys_blocked), puppet.mask & SIGSYS_BIT != 0),
    ] {
        put(offset, &[u8::from(flag)]);
    }
    let user = |index: usize| u32::try_from(index).unwrap_or(u32::MAX).to_le_bytes();
    put(offset_of!(Config, user), &user(home.user));
    put(offset_of!(Config, threshold), &settings.threshold.to_le_bytes());
    put(offset_of!(Config, protection_keys), &protection_keys().to_le_bytes());
    for (index, (start, end, file)) in ranges.iter().enumerate() {
        let at = offset_of!(Config, ranges) + index * size_of::<Range>();
        let marks = settings.policy.marks(&load.program, file.as_bytes());
        for (offset, value) in [
            (offset_of!(Range, start), *start),
            (offset_of!(Range, end), *end),
            (offset_of!(Range, marks), marks),
        ] {
            put(at + offset, &value.to_le_bytes());
        }
    }
    let copied = if settings.code.is_some() { image.shareable() } else { 0 };
    process_memory::write(
        pid,
        base + copied as u64,
        [image.fixed().get(copied..).unwrap_or_default(), &bytes],
    )?;
    if !load.table.is_empty() {
        process_memory::write(pid, base + image.length, [&load.table])?;
    }
    if let Some(shared) = &settings.code {
        let (id, flags) =
            (u64::try_from(shared.id()).unwrap_or(0), u64::try_from(shared_code::ATTACH).unwrap_or(0));
        puppet.call(libc::SYS_shmat, [id, base, flags, 0, 0, 0])?;
    } else {
        let executable = u64::try_from(libc::PROT_READ | libc::PROT_EXEC).unwrap_or(0);
        puppet.call(libc::SYS_mprotect, [code, code_length, executable, 0, 0, 0])?;
    }
    let precise = u64::from(settings.policy.services().sleep.is_some());
    match puppet.run(entries.boot, [0, precise]) {
        // It acts as another user than the program that has executed it.
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => {
            let found = (home.user_of)(pid).ok_or(io::ErrorKind::PermissionDenied)?;
            process_memory::write(pid, base + (config + offset_of!(Config, user)) as u64, [&user(found.0)])?;
            puppet.run(entries.boot, [1, precise])?;
            found.1.page().followed.fetch_add(1, Relaxed);
        }
        result => {
            result?;
            home.page.followed.fetch_add(1, Relaxed);
        }
    }
    Ok(())
}

/// Which services are on in a process: numbers of users may change where nobody has said yet what they are in its
/// namespace.
fn services(pid: libc::pid_t, settings: &Settings) -> u64 {
    let bits = settings.policy.services().bits();
    if bits & service::USER == 0 {
        return bits;
    }
    let mapped = |name: &str| fs::read(format!("/proc/{pid}/{name}")).is_ok_and(|map| !map.is_empty());
    if mapped("uid_map") && mapped("gid_map") { bits } else { bits & !service::USER }
}
