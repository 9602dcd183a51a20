//! The birth of a guarded process: forked, limited, walled in, and held back until its monitor is ready.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::enforcement::Enforcement;
use crate::filter_rules::rules;
use crate::guard::Guard;
use crate::landlock::LandlockDomain;
use crate::log::Writer;
use crate::monitor::Monitor;
use crate::policy::capabilities::numbers;
use crate::questions::Questions;
use crate::state::State;
use crate::{Error, blocking, needs, questions, view};
use orrery_sys::capability::CapabilitySet;
use orrery_sys::errno;
use orrery_sys::notify::Listener;
use orrery_sys::seccomp::{self, Scope};

/// What the child tells: the number of its listener, then, if it comes to that, why the program could not start.
fn tell(pipe: Option<&OwnedFd>, number: i32) {
    let _ = pipe.map(|pipe| rustix::io::write(pipe, &number.to_ne_bytes()));
}

fn hear(pipe: &OwnedFd) -> Option<i32> {
    let mut bytes = [0; 4];
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::io::read(pipe, &mut bytes[filled..]) {
            Ok(0) => return None,
            Ok(read) => filled += read,
            Err(Errno::INTR) => (),
            Err(_) => return None,
        }
    }
    Some(i32::from_ne_bytes(bytes))
}

/// Forks a process, puts the walls around it, starts the monitor's threads, and lets it do `work`, whose result is an
/// error: work that succeeds does not return, or has taken the pipe through which errors are reported. Returns the
/// process, the monitor, and the error, if it came to that before the process ended or executed a program.
pub(crate) fn spawn(
    guard: Guard,
    work: impl FnOnce(&mut Option<OwnedFd>) -> Errno,
) -> Result<(rustix::process::Pid, Arc<State>, Option<Errno>), Error> {
    let enforcement = Enforcement::of(&guard)?;
    let Guard { policy, log, landlock, callback, ask, learn: _, forget: _ } = guard;
    // What it covers is opened before.
    let asked_program = ask.as_deref().map(questions::connect).transpose()?;
    let log = Writer::new(&log)?;
    let mounts = policy.view.as_ref().map(view::enter).transpose()?;
    needs::check()?;
    let domain = if landlock {
        LandlockDomain::new(&policy, enforcement.kernel_opens())?
    } else {
        LandlockDomain::none(&policy)
    };
    let rules = rules(&policy, domain.processes, enforcement.kernel_opens());
    let mut asked = rules.clone();
    for call in callback.iter().flat_map(|callback| &callback.calls) {
        asked.set(*call, seccomp::Action::Notify);
    }
    let program = asked.program();
    let profiles = policy.profiles.iter().map(|profile| profile.program(policy.capabilities));
    let profiles = profiles.collect::<Result<Vec<_>, _>>()?;
    let (limits, capabilities) = (policy.limits, policy.capabilities);
    let pipe =
        || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(Error::kernel("making a pipe"));
    let (from_child, to_parent) = pipe()?;
    let (from_parent, to_child) = pipe()?;
    // SAFETY: this prctl(2) takes no pointer.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
    let parent = rustix::process::getpid();
    // SAFETY: the child makes system calls and calls `work`; it does not return from here.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop((from_child, to_child, asked_program));
        let mut to_parent = Some(to_parent);
        let failed = confine_child(&limits, capabilities, domain.rules.as_ref(), parent)
            .and_then(|()| rustix::thread::set_no_new_privs(true))
            .and_then(|()| seccomp::install(&program, Scope::ThreadWithListener)?.ok_or(Errno::BADF))
            .and_then(|listener| {
                tell(to_parent.as_ref(), listener.as_raw_fd());
                let mut go = [0];
                // The monitor keeps the end of the pipe until it is ready; without a monitor there is nothing to do.
                match rustix::io::retry_on_intr(|| rustix::io::read(&from_parent, &mut go)) {
                    Ok(1) => Ok(()),
                    _ => Err(Errno::IO),
                }
            });
        let failure = match failed {
            // Last, because a profile need not allow what it takes to get here.
            Ok(()) => match profiles
                .iter()
                .try_for_each(|program| seccomp::install(program, Scope::Thread).map(drop))
            {
                Ok(()) => work(&mut to_parent),
                Err(errno) => errno,
            },
            Err(errno) => {
                tell(to_parent.as_ref(), -1);
                errno
            }
        };
        tell(to_parent.as_ref(), failure.raw_os_error());
        // SAFETY: ends the child without anything that belongs to the parent.
        unsafe { libc::_exit(126) };
    }
    drop((to_parent, from_parent));
    more_descriptors();
    let process = rustix::process::Pid::from_raw(child)
        .filter(|_| child > 0)
        .ok_or_else(|| Error::Kernel { operation: "fork", source: std::io::Error::last_os_error() })?;
    let abandon = |error: Error| {
        let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
        let _ = rustix::process::waitpid(Some(process), rustix::process::WaitOptions::empty());
        error
    };
    let number = match hear(&from_child) {
        Some(number) if number >= 0 => number,
        _ => {
            let errno = hear(&from_child).map_or(Errno::IO, Errno::from_raw_os_error);
            let operation =
                "installing the filter (seccomp user notification, Linux 5.9; not inside another guard)";
            return Err(abandon(Error::kernel(operation)(errno)));
        }
    };
    let listener = fetch(process, number)
        .map_err(Error::kernel("fetching the filter's listener (pidfd_getfd)"))
        .map_err(&abandon)?;
    // SAFETY: without effects on memory: nobody without CAP_SYS_PTRACE may trace this process from now on.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
    blocking::prepare().map_err(Error::kernel("sigaction")).map_err(&abandon)?;
    let listener = Listener::new(listener);
    let questions = asked_program
        .map(Questions::start)
        .transpose()
        .map_err(|source| Error::Kernel { operation: "starting the thread for answers", source })
        .map_err(&abandon)?;
    let state = State::new(
        policy,
        listener,
        (log, questions),
        process.as_raw_pid(),
        (domain.executions, domain.executables),
        mounts,
    )
    .map_err(Error::kernel("reading /proc/self/status"))
    .map_err(&abandon)?;
    let state = Arc::new(state);
    Arc::new(Monitor::new(Arc::clone(&state), callback, rules))
        .start()
        .map_err(|source| Error::Kernel { operation: "starting the monitor's threads", source })
        .map_err(&abandon)?;
    rustix::io::write(&to_child, &[1]).map_err(Error::kernel("writing to a pipe")).map_err(&abandon)?;
    drop(to_child);
    let failure = hear(&from_child).map(Errno::from_raw_os_error);
    Ok((process, state, failure))
}

/// The monitor holds descriptors for others; what they may have themselves is their own limit, which they have by now.
fn more_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Between fork and exec: system calls only.
fn confine_child(
    limits: &crate::policy::Limits,
    capabilities: CapabilitySet,
    rules: Option<&OwnedFd>,
    parent: rustix::process::Pid,
) -> Result<(), Errno> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    // Convenience: a program without a monitor can do nothing of interest anyway.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    if rustix::process::getppid() != Some(parent) {
        return Err(Errno::SRCH);
    }
    // Rust programs ignore it; others expect the default.
    // SAFETY: SIG_DFL installs no function as a handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    // SAFETY: zero is an empty set of signals.
    let mut none: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set lives; the result is the old mask, which nobody needs.
    unsafe {
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
    // The kernel writes a core into the process's directory, which no policy prevents.
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    let settings = [
        (Resource::Nproc, limits.processes.map(u64::from)),
        (Resource::As, limits.memory),
        (Resource::Nofile, limits.open_files),
        (Resource::Fsize, limits.file_size),
        (Resource::Cpu, limits.cpu_seconds),
    ];
    for (resource, limit) in settings {
        if limit.is_some() {
            setrlimit(resource, Rlimit { current: limit, maximum: limit })?;
        }
    }
    keep(capabilities)?;
    if let Some(rules) = rules {
        rustix::thread::set_no_new_privs(true)?;
        // SAFETY: the descriptor is one of rules; this concerns the calling thread only.
        unsafe { syscall!(Sysno::landlock_restrict_self, rules.as_raw_fd(), 0) }.map_err(errno)?;
    }
    Ok(())
}

/// Gives up all capabilities but these, for this process and all that it executes.
fn keep(capabilities: CapabilitySet) -> Result<(), Errno> {
    use rustix::thread::{capabilities as sets_of, clear_ambient_capability_set, set_capabilities};
    let mut sets = sets_of(None)?;
    // Without CAP_SETPCAP the bounding set stays. The filter comes with no_new_privs, under which nobody gains what is
    // not permitted (capabilities(7)).
    if sets.effective.contains(CapabilitySet::SETPCAP) {
        for number in numbers().filter(|number| capabilities.bits() & (1 << number) == 0) {
            // SAFETY: numbers go by value. Those that this kernel does not know are errors.
            unsafe { libc::prctl(libc::PR_CAPBSET_DROP, number, 0, 0, 0) };
        }
    }
    match clear_ambient_capability_set() {
        // A kernel without such a set (before Linux 4.3).
        Ok(()) | Err(Errno::INVAL) => (),
        Err(errno) => return Err(errno),
    }
    sets.effective &= capabilities;
    sets.permitted &= capabilities;
    sets.inheritable &= capabilities;
    set_capabilities(None, sets)
}

/// Fetches a descriptor of the child's.
fn fetch(process: rustix::process::Pid, number: i32) -> Result<OwnedFd, Errno> {
    let handle = rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty())?;
    // SAFETY: the call takes numbers only, and makes a descriptor that nobody knows yet.
    let fetched = unsafe { syscall!(Sysno::pidfd_getfd, handle.as_raw_fd(), number, 0) }.map_err(errno)?;
    let fetched = i32::try_from(fetched).map_err(|_| Errno::BADF)?;
    // SAFETY: the kernel made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fetched) })
}
