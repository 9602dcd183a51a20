//! Puts an executive under a program that has just been executed.
//!
//! The program's thread stands in its `execve`, before its first instruction. As it goes on it attaches the image's code (see
//! [`crate::shared_code`]) and runs what that begins with, which makes the image's data, attaches the page, takes SIGSYS and arms
//! dispatch, and sends itself a signal when it is done: see [`at_exec`]. It has the registers back then that the kernel gave it.
//!
//! Each stop costs two changes between processes, and each look into `/proc` some microseconds, for every program that
//! is executed. So there are these two stops: when it has executed the program, and at the signal.
//!
//! Where that cannot be, as in a static program or where the code is not shared, it is made to perform two system calls, with
//! the `syscall` instruction that the kernel's vDSO contains: map room for the image, attach its code there (where that is
//! copied, make it executable). The image's data, its settings and the policy's table are written at once. It stops at
//! the end of its `execve` then, and behind each of the two calls. The kernel stops a thread behind a call by a SIGTRAP which
//! it forces on it, and so makes a thread that ignores the signal (handlers are gone by then) receive it from then on. Who
//! ignores it is stopped before its calls, too, which needs no signal.

mod at_exec;
pub(crate) mod attach;
pub(crate) mod detach;
pub(crate) mod halt;
mod puppet;

use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::mem::offset_of;
use std::os::unix::ffi::OsStringExt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use orrery_hijack_image::config::{ACTION_FLAGS, Action, Config, RANGES, Range, boot, service};
use orrery_hijack_image::shared_page::{SharedPage, Unfollowed};

use crate::archive::Mounted;
use crate::image::{Entries, Image, PAGE};
use crate::maps::Maps;
use crate::policy::{Policy, Strictness, handlers_code};
use crate::shared_code::{self, SharedCode};
use crate::shared_segment::{SharedSegment, UserMemory};
use crate::unfollowed;
use orrery_sys::process_memory;
use orrery_sys::ptrace::Tracee;
use puppet::{LATE, Puppet};
use rustix::process::{Pid, Signal, kill_process};

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

/// Puts an executive under the program that `tracee` has executed, and lets it go with this mask. `forcible` says that
/// it ignores neither SIGTRAP nor SIGSEGV.
///
/// Returns whether the thread was certainly detached. Where there is no executive, that is counted, and the program
/// runs without.
pub(crate) fn inject(
    mut tracee: Tracee,
    (mask, forcible): (u64, bool),
    image: &Image,
    home: &Home<'_>,
    settings: &Settings,
) -> bool {
    let result = prepare(&mut tracee, (mask, forcible), image, home, settings);
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
            let target = Pid::from_raw(pid).zip(Signal::from_named_raw(signal));
            let _gone = target.map(|(pid, signal)| kill_process(pid, signal));
        }
    }
    detached
}

/// Returns which signals the process was sent meanwhile.
fn prepare(
    tracee: &mut Tracee,
    (mask, forcible): (u64, bool),
    image: &Image,
    home: &Home<'_>,
    settings: &Settings,
) -> Result<[bool; LATE.len()], Unfollowed> {
    let failed = |_: io::Error| Unfollowed::Failed;
    let registers = tracee.registers().map_err(failed)?;
    if registers.cs != LONG_MODE {
        return Err(Unfollowed::Foreign);
    }
    let mut puppet = Puppet {
        tracee,
        registers,
        gadget: 0,
        stack: None,
        covered: None,
        mask,
        forcible,
        late: [false; LATE.len()],
    };
    let maps = Maps::of_new(puppet.tracee.pid()).map_err(failed)?;
    let load = Load::new(puppet.tracee.pid(), image, settings).map_err(failed)?;
    let placed = place(&mut puppet, &maps, &load, home, settings);
    // With an executive or without, the program starts with the registers that the kernel gave it.
    puppet.uncover().map_err(failed)?;
    puppet.tracee.set_registers(&puppet.registers).map_err(failed)?;
    placed.map_err(failed)?;
    Ok(puppet.late)
}

/// Puts the image there and has it begin: in one go, or step by step.
fn place(
    puppet: &mut Puppet<'_>,
    maps: &Maps,
    load: &Load<'_>,
    home: &Home<'_>,
    settings: &Settings,
) -> io::Result<()> {
    match at_exec::begin(puppet, maps, load, home, settings)? {
        at_exec::Outcome::Begun(placed, result) => {
            let concluded = begun(puppet, &placed, precise(settings), home, result);
            if concluded.is_err() {
                puppet.find_gadget(maps)?;
                unmap(puppet, &placed, load)?;
            }
            return concluded;
        }
        at_exec::Outcome::Impossible => {
            // To the end of the execve, which would overwrite rax.
            puppet.run_to_call()?;
            puppet.registers = puppet.tracee.registers()?;
            puppet.registers.orig_rax = u64::MAX;
        }
        at_exec::Outcome::Failed => {}
    }
    puppet.find_gadget(maps)?;
    arrange(puppet, maps, load, home, settings, Begin::Program).map(drop)
}

/// Returns whether programs may read `fs` without the kernel, and have the instruction that hashes it.
fn may_read_fs() -> bool {
    /// `HWCAP2_FSGSBASE` of `asm/hwcap2.h`.
    const FSGSBASE: u64 = 1 << 1;
    // SAFETY: the call takes no pointer.
    let allowed = unsafe { libc::getauxval(libc::AT_HWCAP2) } & FSGSBASE != 0;
    allowed && std::arch::is_x86_feature_detected!("sse4.2")
}

/// Returns where a signal frame has PKRU, from the beginning of the extended state in it; zero where the kernel uses
/// no protection keys.
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

/// Where a program is when it gets its executive.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begin {
    /// Before its first instruction. Whose memory it has is known unless the program acts as another user than the one that executed it.
    Program,
    /// The thread may be anywhere; the owner of its memory is known.
    Running,
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

    /// Returns what the image has from its first byte on that is not shared, where it is to be at an address in a process.
    fn placed(
        &self,
        base: u64,
        puppet: &Puppet<'_>,
        maps: &Maps,
        home: &Home<'_>,
        settings: &Settings,
    ) -> Placed {
        let image = self.image;
        let config = usize::try_from(image.config).unwrap_or(0);
        let ranges = maps.code.get(..maps.code.len().min(RANGES)).unwrap_or_default();
        let end = config + offset_of!(Config, ranges) + size_of::<Range>() * ranges.len();
        let (mut bytes, entries) = image.placed(base, end);
        let mut put = |offset: usize, value: &[u8]| {
            if let Some(place) = bytes
                .get_mut(config + offset - image.shared_length()..)
                .and_then(|rest| rest.get_mut(..value.len()))
            {
                place.copy_from_slice(value);
            }
        };
        let code = base + image.code.start;
        let code_length = image.code.end - image.code.start;
        let action = offset_of!(Config, action);
        let table = base + image.length;
        let (handlers, handlers_length) = handlers_code(&self.table);
        for (offset, value) in [
            (offset_of!(Config, verdicts_segment), u64::try_from(home.segment.verdicts_id()).unwrap_or(0)),
            (offset_of!(Config, image), base),
            (offset_of!(Config, image_length), self.length()),
            (offset_of!(Config, policy), if self.table.is_empty() { 0 } else { table }),
            (offset_of!(Config, handlers), table + handlers),
            (offset_of!(Config, handlers_length), handlers_length),
            (offset_of!(Config, services), services(puppet.tracee.pid(), settings)),
            (offset_of!(Config, poll_receive), settings.policy.services().poll_receive_nanoseconds()),
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
        put(offset_of!(Config, user), &user_bytes(home.user));
        put(offset_of!(Config, threshold), &settings.threshold.to_le_bytes());
        put(offset_of!(Config, protection_keys), &protection_keys().to_le_bytes());
        for (index, range) in ranges.iter().enumerate() {
            let at = offset_of!(Config, ranges) + index * size_of::<Range>();
            let marks = settings.policy.marks(&self.program, range.file.as_bytes());
            for (offset, value) in [
                (offset_of!(Range, start), range.start),
                (offset_of!(Range, end), range.end),
                (offset_of!(Range, marks), marks),
            ] {
                put(at + offset, &value.to_le_bytes());
            }
        }
        let copied = if settings.code.is_some() { Vec::new() } else { image.shared() };
        let own = base + (image.shared_length() - copied.len()) as u64;
        let user = base + image.config + offset_of!(Config, user) as u64;
        Placed { base, own, user, copied, bytes, entries }
    }
}

/// An image at its address in a process.
struct Placed {
    base: u64,
    /// Where the bytes begin that are not shared.
    own: u64,
    /// Where it says whose memory it has.
    user: u64,
    /// [`Image::shared`], where these bytes are not.
    copied: Vec<u8>,
    /// The bytes of the image that follow these.
    bytes: Vec<u8>,
    entries: Entries,
}

/// Returns an index among the users, as an image has it.
fn user_bytes(index: usize) -> [u8; 4] {
    u32::try_from(index).unwrap_or(u32::MAX).to_le_bytes()
}

fn arrange(
    puppet: &mut Puppet<'_>,
    maps: &Maps,
    load: &Load<'_>,
    home: &Home<'_>,
    settings: &Settings,
    begin: Begin,
) -> io::Result<Entries> {
    let protection = u64::try_from(libc::PROT_READ | libc::PROT_WRITE).unwrap_or(0);
    let flags = u64::try_from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).unwrap_or(0);
    let base = puppet.call(libc::SYS_mmap, [0, load.length(), protection, flags, u64::MAX, 0])?;
    let placed = load.placed(base, puppet, maps, home, settings);
    let result = furnish(puppet, &placed, load, home, settings, begin);
    if result.is_err() {
        unmap(puppet, &placed, load)?;
    }
    result.map(|()| placed.entries)
}

/// Takes away an image that has not begun.
fn unmap(puppet: &mut Puppet<'_>, placed: &Placed, load: &Load<'_>) -> io::Result<()> {
    puppet.call(libc::SYS_munmap, [placed.base, load.length(), 0, 0, 0, 0]).map(drop)
}

fn furnish(
    puppet: &mut Puppet<'_>,
    placed: &Placed,
    load: &Load<'_>,
    home: &Home<'_>,
    settings: &Settings,
    begin: Begin,
) -> io::Result<()> {
    let (image, base, pid) = (load.image, placed.base, puppet.tracee.pid());
    process_memory::write(pid, placed.own, [&placed.copied, &placed.bytes])?;
    if !load.table.is_empty() {
        process_memory::write(pid, base + image.length, [&load.table])?;
    }
    if let Some(shared) = &settings.code {
        let (id, flags) = (shared.id(), u64::try_from(shared_code::REPLACE).unwrap_or(0));
        puppet.call(libc::SYS_shmat, [id, base, flags, 0, 0, 0])?;
    } else {
        let executable = u64::try_from(libc::PROT_READ | libc::PROT_EXEC).unwrap_or(0);
        let code = &image.code;
        puppet.call(libc::SYS_mprotect, [base + code.start, code.end - code.start, executable, 0, 0, 0])?;
    }
    let (checked, mut options) = match begin {
        Begin::Program => (0, 0),
        Begin::Running => (1, boot::RUNNING),
    };
    options |= precise(settings);
    let result = puppet.run(placed.entries.boot, [checked, options]);
    begun(puppet, placed, options, home, result)
}

/// Returns the option [`boot::PRECISE`], where that is asked for.
fn precise(settings: &Settings) -> u64 {
    if settings.policy.services().sleep.is_some() { boot::PRECISE } else { 0 }
}

/// Concludes what an image's beginning returned, which had these options.
fn begun(
    puppet: &mut Puppet<'_>,
    placed: &Placed,
    options: u64,
    home: &Home<'_>,
    result: io::Result<u64>,
) -> io::Result<()> {
    match result {
        // It acts as another user than the program that has executed it.
        Err(error) if error.raw_os_error() == Some(libc::EACCES) => {
            let pid = puppet.tracee.pid();
            let found = (home.user_of)(pid).ok_or(io::ErrorKind::PermissionDenied)?;
            process_memory::write(pid, placed.user, [&user_bytes(found.0)])?;
            puppet.run(placed.entries.boot, [1, options])?;
            found.1.page().followed.fetch_add(1, Relaxed);
        }
        result => {
            result?;
            home.page.followed.fetch_add(1, Relaxed);
        }
    }
    Ok(())
}

/// Returns which services are on in a process: numbers of users may change where nobody has said yet what they are in
/// its namespace.
fn services(pid: libc::pid_t, settings: &Settings) -> u64 {
    let bits = settings.policy.services().bits();
    if bits & service::USER == 0 {
        return bits;
    }
    let mapped = |name: &str| fs::read(format!("/proc/{pid}/{name}")).is_ok_and(|map| !map.is_empty());
    if mapped("uid_map") && mapped("gid_map") { bits } else { bits & !service::USER }
}
