//! Domains live, obey, die and come back.
//!
//! Forking belongs to a process with one thread, so each case is a process of its own: this program runs itself once for
//! each.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use orrery_domain::{
    Channel, Class, Descriptors, Domain, End, Error, Limits, Means, Moment, Partner, Settings, Side, Woken,
};
use rustix::process::{Resource, Rlimit, Signal};

orrery_testing::cases![
    seconds = 60, trackers = &[];
    messages_come_back,
    hand_over_works_in_every_placement,
    an_end_is_noticed,
    a_killed_sleeper_is_noticed_at_once,
    a_domain_ends_with_main,
    a_busy_domain_ends_with_main,
    a_spare_ends_with_main,
    a_thread_may_make_a_domain_and_end,
    instances_follow_one_another,
    instances_are_children_of_main,
    a_dead_spare_is_told,
    no_more_processes_is_told,
    memory_is_bounded,
    processes_are_bounded,
    a_read_only_control_group_tree_falls_back,
    without_privilege_process_limits_stand_in,
    the_processor_share_is_bounded,
    process_limits_hold,
    scheduling_is_set,
    impossible_settings_name_the_step,
    descriptors_are_closed,
    signals_are_fresh,
    dropping_leaves_no_process_and_no_group,
    a_forked_child_of_main_harms_nothing,
    older_kernels_are_served,
];

/// A domain that answers messages; what it does is said by the first byte.
struct Echo {
    main: Side,
    domain: Domain,
    channel: Arc<Channel>,
}

impl Echo {
    fn start(settings: &Settings) -> Result<Self, Error> {
        let channel = Arc::new(Channel::new("echo", 8, 64)?);
        let inner = Arc::clone(&channel);
        // SAFETY: the channel is kept beside its only end.
        let main = unsafe { channel.main() };
        let body = Box::new(move || {
            // SAFETY: the body runs in the domain, has the channel, and takes this end once; main's stays in main.
            let mut side = unsafe { inner.domain() }.unwrap();
            serve(&mut side);
        });
        // SAFETY: the channel is dropped after the domain. Where a case has another thread, that one waits
        // meanwhile and holds no lock that the body could want.
        let domain = unsafe { Domain::start(settings, &channel, body)? };
        Ok(Self { main, domain, channel })
    }

    fn ask(&mut self, message: &[u8]) -> Result<Vec<u8>, Woken> {
        self.ask_until(message, None)
    }

    fn ask_until(&mut self, message: &[u8], until: Option<Moment>) -> Result<Vec<u8>, Woken> {
        self.main.send(&[message]).unwrap();
        self.main.gate().ring();
        loop {
            let heard = self.main.gate().heard();
            let mut buffer = [0; 64];
            if let Some(len) = self.main.peek(&mut buffer).unwrap() {
                self.main.take();
                return Ok(buffer[..len].to_vec());
            }
            let partner = Partner::Pidfd(self.domain.process().as_fd());
            match self.main.gate().wait(heard, until, partner) {
                Woken::Rung => {}
                other => return Err(other),
            }
        }
    }

    fn number(&mut self, what: &[u8]) -> i64 {
        String::from_utf8(self.ask(what).unwrap()).unwrap().parse().unwrap()
    }
}

fn settings() -> Settings {
    let mut settings = Settings::default();
    settings.name = "echo".to_owned();
    settings
}

fn restartable() -> Settings {
    let mut settings = settings();
    settings.restartable = true;
    settings
}

fn serve(side: &mut Side) {
    let mut buffer = [0; 64];
    let mut kept: Vec<Vec<u8>> = Vec::new();
    loop {
        let heard = side.gate().heard();
        let Some(len) = side.peek(&mut buffer).unwrap() else {
            side.gate().wait(heard, None, Partner::Watched);
            continue;
        };
        side.take();
        let answer = match buffer[0] {
            b'=' => buffer[1..len].to_vec(),
            b'x' => std::process::exit(5),
            b's' => {
                // SAFETY: ends the domain, as is wanted.
                unsafe { libc::raise(libc::SIGSEGV) };
                vec![]
            }
            b'l' => loop {
                std::hint::spin_loop();
            },
            b'm' => {
                let bytes = 512 << 20;
                let mut block = vec![0_u8; bytes];
                for page in block.chunks_mut(4096) {
                    page[0] = 1;
                }
                kept.push(block);
                b"0".to_vec()
            }
            b'f' => {
                // SAFETY: a domain has one thread that uses locks, and the child calls what is async-signal-safe.
                let child = unsafe {
                    match libc::fork() {
                        0 => {
                            libc::pause();
                            libc::_exit(0)
                        }
                        pid => pid,
                    }
                };
                text(i64::from(child))
            }
            b'p' => text(i64::from(rustix::process::getppid().map_or(0, rustix::process::Pid::as_raw_pid))),
            b'i' => text(own_pid()),
            // SAFETY: the call takes no pointer.
            b'c' => text(i64::from(unsafe { libc::sched_getscheduler(0) })),
            b'n' => text(i64::from(rustix::process::getpriority_process(None).unwrap())),
            b'a' => text(i64::from(rustix::thread::sched_getaffinity(None).unwrap().count())),
            b'o' => text(
                i64::try_from(rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(0)).unwrap(),
            ),
            b'd' => {
                let fd: i32 = String::from_utf8(buffer[1..len].to_vec()).unwrap().parse().unwrap();
                // SAFETY: any number may be asked about.
                text(i64::from(unsafe { libc::fcntl(fd, libc::F_GETFD) }))
            }
            b'h' => {
                // SAFETY: of numbers and pointers, for which zero is a value.
                let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
                // SAFETY: changes nothing, and writes to the action.
                unsafe { libc::sigaction(libc::SIGUSR1, std::ptr::null(), &raw mut action) };
                text(i64::try_from(action.sa_sigaction).unwrap())
            }
            b'b' => {
                // SAFETY: a set of signals consists of integers, for which zero is a valid value.
                let mut mask: libc::sigset_t = unsafe { std::mem::zeroed() };
                // SAFETY: changes nothing, and writes to the mask.
                unsafe { libc::sigprocmask(0, std::ptr::null(), &raw mut mask) };
                // SAFETY: `mask` was initialised above and outlives the call, which only reads it.
                text(i64::from(unsafe { libc::sigismember(&raw const mask, libc::SIGUSR2) }))
            }
            // How much of a second's processor time it gets.
            b't' => {
                let begin = Instant::now();
                let used = || rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
                let before = used();
                while begin.elapsed() < Duration::from_millis(600) {
                    std::hint::spin_loop();
                }
                let (after, spent) = (used(), begin.elapsed());
                let used = (after.tv_sec - before.tv_sec) * 1_000_000_000 + after.tv_nsec - before.tv_nsec;
                text(used * 100 / i64::try_from(spent.as_nanos()).unwrap())
            }
            _ => b"?".to_vec(),
        };
        side.send(&[&answer]).unwrap();
        side.gate().ring();
    }
}

fn text(number: i64) -> Vec<u8> {
    number.to_string().into_bytes()
}

fn own_pid() -> i64 {
    i64::from(rustix::process::getpid().as_raw_pid())
}

/// Returns whether a process is gone or a zombie, after a while.
fn ends(pid: i64) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(20) {
        match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Err(_) => return true,
            Ok(stat) if stat.rsplit(')').next().unwrap().trim_start().starts_with(['Z', 'X']) => return true,
            Ok(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
    false
}

fn messages_come_back() {
    let mut echo = Echo::start(&settings()).unwrap();
    for i in 0..2_000_u32 {
        let message = format!("={i}");
        assert_eq!(echo.ask(message.as_bytes()).unwrap(), message.as_bytes()[1..]);
    }
    assert_eq!(echo.number(b"p"), own_pid());
}

fn hand_over_works_in_every_placement() {
    let mut echo = Echo::start(&settings()).unwrap();
    let cpus = rustix::thread::sched_getaffinity(None).unwrap();
    let pid = echo.domain.process().pid();
    for cpu in (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| cpus.is_set(*cpu)) {
        let mut one = rustix::thread::CpuSet::new();
        one.set(cpu);
        rustix::thread::sched_setaffinity(Some(pid), &one).unwrap();
        for _ in 0..500 {
            assert_eq!(echo.ask(b"=a").unwrap(), b"a");
        }
        // Long enough for both to have gone to sleep.
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn an_end_is_noticed() {
    for (order, end) in [(b"x", End::Exited { status: 5 }), (b"s", End::Killed { signal: 11 })] {
        let mut echo = Echo::start(&settings()).unwrap();
        assert_eq!(echo.ask(order).unwrap_err(), Woken::PartnerGone);
        assert_eq!(echo.domain.process().end(), Some(end));
    }
}

fn a_killed_sleeper_is_noticed_at_once() {
    let mut echo = Echo::start(&settings()).unwrap();
    echo.ask(b"=").unwrap();
    let pid = echo.domain.process().pid();
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
    });
    assert_eq!(echo.ask(b"l").unwrap_err(), Woken::PartnerGone);
    killer.join().unwrap();
    assert_eq!(echo.domain.process().end(), Some(End::Killed { signal: 9 }));
}

/// Forks a child that runs `work`, is then killed, and tells a number through a pipe first.
fn killed_main(work: impl FnOnce() -> Vec<i64>) -> Vec<i64> {
    let (read, write) = rustix::pipe::pipe().unwrap();
    // SAFETY: the process has one thread, so the child finds no lock held.
    match unsafe { libc::fork() } {
        0 => {
            drop(read);
            let numbers: Vec<String> = work().iter().map(ToString::to_string).collect();
            rustix::io::write(&write, numbers.join(" ").as_bytes()).unwrap();
            rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
            unreachable!();
        }
        child => {
            drop(write);
            let mut status = 0;
            // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            let mut buffer = [0; 200];
            let len = rustix::io::read(&read, &mut buffer).unwrap();
            let text = std::str::from_utf8(&buffer[..len]).unwrap();
            text.split(' ').map(|number| number.parse().unwrap()).collect()
        }
    }
}

fn a_domain_ends_with_main() {
    let pids = killed_main(|| {
        let mut echo = Echo::start(&settings()).unwrap();
        let pid = echo.number(b"i");
        std::mem::forget(echo);
        vec![pid]
    });
    assert!(ends(pids[0]), "{pids:?}");
}

fn a_busy_domain_ends_with_main() {
    let pids = killed_main(|| {
        let mut echo = Echo::start(&settings()).unwrap();
        let pid = echo.number(b"i");
        let soon = Moment::now().after(Duration::from_millis(10));
        assert_eq!(echo.ask_until(b"l", Some(soon)).unwrap_err(), Woken::TimedOut);
        std::mem::forget(echo);
        vec![pid]
    });
    assert!(ends(pids[0]), "{pids:?}");
}

fn a_spare_ends_with_main() {
    let pids = killed_main(|| {
        let echo = Echo::start(&restartable()).unwrap();
        let spare = echo.domain.spare().unwrap().pid();
        let domain = echo.domain.process().pid();
        std::mem::forget(echo);
        vec![i64::from(spare.as_raw_pid()), i64::from(domain.as_raw_pid())]
    });
    assert!(ends(pids[0]) && ends(pids[1]), "{pids:?}");
}

fn a_thread_may_make_a_domain_and_end() {
    let mut echo = std::thread::spawn(|| Echo::start(&restartable()).unwrap()).join().unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(echo.ask(b"=still there").unwrap(), b"still there");
    assert_eq!(echo.ask(b"x").unwrap_err(), Woken::PartnerGone);
    echo.main.succeed(true);
    std::thread::scope(|scope| {
        scope.spawn(|| echo.domain.relaunch().unwrap()).join().unwrap();
    });
    assert_eq!(echo.ask(b"=again").unwrap(), b"again");
}

fn instances_follow_one_another() {
    let mut echo = Echo::start(&restartable()).unwrap();
    let mut seen = vec![echo.number(b"i")];
    for round in 0..20 {
        assert_eq!(echo.ask(if round % 2 == 0 { b"s" } else { b"x" }).unwrap_err(), Woken::PartnerGone);
        echo.main.succeed(true);
        echo.domain.relaunch().unwrap();
        let pid = echo.number(b"i");
        assert!(!seen.contains(&pid));
        seen.push(pid);
        assert_eq!(echo.number(b"p"), own_pid());
    }
    let _ = &echo.channel;
}

fn instances_are_children_of_main() {
    let mut echo = Echo::start(&restartable()).unwrap();
    let pid = echo.domain.process().pid();
    assert_eq!(echo.number(b"p"), own_pid());
    let spare = echo.domain.spare().unwrap().pid();
    drop(echo);
    for pid in [pid, spare] {
        assert!(!std::path::Path::new(&format!("/proc/{}", pid.as_raw_pid())).exists(), "reaped");
    }
    let mut status = 0;
    // SAFETY: the kernel writes at most one `int` to `status`, which outlives the call.
    assert_eq!(unsafe { libc::waitpid(-1, &raw mut status, 0) }, -1, "no child is left");
}

fn a_dead_spare_is_told() {
    let mut echo = Echo::start(&restartable()).unwrap();
    let spare = echo.domain.spare().unwrap();
    spare.signal(Signal::KILL).unwrap();
    assert_eq!(echo.ask(b"=lives").unwrap(), b"lives");
    assert_eq!(echo.domain.relaunch().unwrap_err(), Error::SpareGone { name: "echo".to_owned() });
}

fn no_more_processes_is_told() {
    // Root is exempt from RLIMIT_NPROC, nobody is not.
    let nobody = 65_534;
    // SAFETY: takes numbers; the process is this case's own.
    if unsafe { libc::setresuid(nobody, nobody, nobody) } != 0 {
        orrery_testing::skipped!("not run as root");
        return;
    }
    let mut echo = Echo::start(&restartable()).unwrap();
    assert_eq!(echo.ask(b"x").unwrap_err(), Woken::PartnerGone);
    echo.main.succeed(true);
    let spare = echo.domain.spare().unwrap().pid();
    let none = Rlimit { current: Some(0), maximum: rustix::process::getrlimit(Resource::Nproc).maximum };
    let before = rustix::process::prlimit(Some(spare), Resource::Nproc, none).unwrap();
    let error = echo.domain.relaunch().unwrap_err();
    assert!(error.to_string().contains("RLIMIT_NPROC"), "{error}");
    rustix::process::prlimit(Some(spare), Resource::Nproc, before).unwrap();
    echo.domain.relaunch().unwrap();
    assert_eq!(echo.ask(b"=again").unwrap(), b"again");
}

fn memory_is_bounded() {
    let mut settings = settings();
    settings.limits = Limits::default();
    settings.limits.memory = Some(64 << 20);
    let mut echo = Echo::start(&settings).unwrap();
    assert_eq!(echo.ask(b"=x").unwrap(), b"x");
    match echo.domain.enforcement().memory {
        Means::Version1 | Means::Version2 => {
            assert!(echo.domain.memory_used().is_some());
            assert_eq!(echo.ask(b"m").unwrap_err(), Woken::PartnerGone);
            assert_eq!(echo.domain.process().end(), Some(End::Killed { signal: 9 }));
            assert_eq!(echo.domain.memory_kills(), 1);
        }
        means => {
            orrery_testing::skipped!("the group: held by {means}");
            assert_eq!(echo.ask(b"m").unwrap_err(), Woken::PartnerGone);
        }
    }
}

fn processes_are_bounded() {
    let mut settings = settings();
    settings.limits.processes = Some(2);
    let mut echo = Echo::start(&settings).unwrap();
    if echo.domain.enforcement().processes == Means::ProcessLimit {
        orrery_testing::skipped!("no group can be made here");
        return;
    }
    let child = echo.number(b"f");
    assert!(child > 0);
    assert_eq!(echo.number(b"f"), -1);
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(i32::try_from(child).unwrap()).unwrap(),
        Signal::KILL,
    )
    .unwrap();
}

fn bounded() -> Settings {
    let mut settings = settings();
    settings.limits.memory = Some(64 << 20);
    settings.limits.cpu_percent = Some(50);
    settings.limits.processes = Some(16);
    settings
}

/// The memory bound holds without a group.
fn falls_back() {
    let mut echo = Echo::start(&bounded()).unwrap();
    let held = echo.domain.enforcement();
    assert_eq!(
        (held.memory, held.cpu, held.processes),
        (Means::ProcessLimit, Means::Nice, Means::ProcessLimit)
    );
    assert_eq!(echo.number(b"n"), 19);
    // The allocator is refused, and Rust's answer to that is to abort.
    assert_eq!(echo.ask(b"m").unwrap_err(), Woken::PartnerGone);
    assert_eq!(echo.domain.process().end(), Some(End::Killed { signal: libc::SIGABRT }));
}

fn a_read_only_control_group_tree_falls_back() {
    // SAFETY: the process is this case's own, and the strings end with a zero.
    let private = unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(
                c"none".as_ptr(),
                c"/".as_ptr(),
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            ) == 0
    };
    if !private {
        orrery_testing::skipped!("no mount namespace to be had");
        return;
    }
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    for line in mounts.lines().filter(|line| line.contains(" cgroup")) {
        let place = std::ffi::CString::new(line.split(' ').nth(1).unwrap()).unwrap();
        let flags = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY;
        // SAFETY: the name ends with a zero; mounts are this process' own.
        let done = unsafe {
            libc::mount(std::ptr::null(), place.as_ptr(), std::ptr::null(), flags, std::ptr::null())
        };
        assert_eq!(done, 0, "{line}");
    }
    falls_back();
}

fn without_privilege_process_limits_stand_in() {
    let nobody = 65_534;
    // SAFETY: takes numbers; the process is this case's own.
    if unsafe { libc::setresuid(nobody, nobody, nobody) } != 0 {
        orrery_testing::skipped!("not run as root");
        return;
    }
    falls_back();
    let mut settings = settings();
    settings.scheduling.class = Class::Fifo { priority: 1 };
    let error = Echo::start(&settings).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("CAP_SYS_NICE"), "{error}");
}

fn the_processor_share_is_bounded() {
    let mut settings = settings();
    settings.limits.cpu_percent = Some(20);
    let mut echo = Echo::start(&settings).unwrap();
    if echo.domain.enforcement().cpu == Means::Nice {
        assert_eq!(echo.number(b"n"), 19);
        orrery_testing::skipped!("no group can be made here");
        return;
    }
    // The quota is a bound of the kernel's, whatever else runs.
    let share = echo.number(b"t");
    assert!(share <= 45, "{share} %");
}

fn process_limits_hold() {
    let mut settings = settings();
    settings.limits.open_files = Some(100);
    settings.limits.cpu_time = Some(Duration::from_secs(1));
    let mut echo = Echo::start(&settings).unwrap();
    assert_eq!(echo.number(b"o"), 100);
    assert_eq!(echo.ask(b"l").unwrap_err(), Woken::PartnerGone);
    let end = echo.domain.process().end().unwrap();
    assert!(matches!(end, End::Killed { signal: libc::SIGXCPU | libc::SIGKILL }), "{end}");
}

fn scheduling_is_set() {
    let mut settings = settings();
    settings.scheduling.class = Class::Batch;
    settings.scheduling.nice = Some(7);
    settings.scheduling.cpus = Some(vec![0]);
    let mut echo = Echo::start(&settings).unwrap();
    assert_eq!(echo.number(b"c"), i64::from(libc::SCHED_BATCH));
    assert_eq!(echo.number(b"n"), 7);
    assert_eq!(echo.number(b"a"), 1);
}

fn impossible_settings_name_the_step() {
    let mut settings = settings();
    settings.scheduling.cpus = Some(vec![1_000]);
    for restart in [false, true] {
        settings.restartable = restart;
        let error = Echo::start(&settings).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("choose its CPUs"), "{error}");
        let mut status = 0;
        // SAFETY: the kernel writes at most one `int` to `status`, which outlives the call.
        assert_eq!(unsafe { libc::waitpid(-1, &raw mut status, 0) }, -1, "no child is left");
    }
}

fn descriptors_are_closed() {
    let kept = std::fs::File::open("/dev/null").unwrap();
    let closed = std::fs::File::open("/dev/null").unwrap();
    let mut settings = settings();
    settings.descriptors = Descriptors::Only(vec![0, 1, 2, kept.as_raw_fd()]);
    let mut echo = Echo::start(&settings).unwrap();
    assert_eq!(echo.number(format!("d{}", kept.as_raw_fd()).as_bytes()), 1);
    assert_eq!(echo.number(format!("d{}", closed.as_raw_fd()).as_bytes()), -1);
    assert_eq!(echo.number(b"p"), own_pid());
}

fn signals_are_fresh() {
    extern "C" fn handler(_: i32) {}
    // SAFETY: the handler does nothing, and the mask is one of numbers that both calls have to themselves.
    unsafe {
        libc::signal(libc::SIGUSR1, handler as *const () as usize);
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut mask, libc::SIGUSR2);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const mask, std::ptr::null_mut());
    }
    let mut fresh = Echo::start(&settings()).unwrap();
    assert_eq!((fresh.number(b"h"), fresh.number(b"b")), (0, 0));
    let mut settings = settings();
    settings.signals = orrery_domain::Signals::Keep;
    let mut kept = Echo::start(&settings).unwrap();
    assert_ne!(kept.number(b"h"), 0);
    assert_eq!(kept.number(b"b"), 1);
}

fn dropping_leaves_no_process_and_no_group() {
    let mut settings = restartable();
    settings.limits.memory = Some(64 << 20);
    settings.limits.processes = Some(8);
    settings.limits.cpu_percent = Some(50);
    let before = std::fs::read_dir("/proc/self/fd").unwrap().count();
    for _ in 0..3 {
        let echo = Echo::start(&settings).unwrap();
        drop(echo);
    }
    assert_eq!(std::fs::read_dir("/proc/self/fd").unwrap().count(), before);
    let pattern = format!("orrery-{}-", std::process::id());
    for controller in ["memory", "pids", "cpu", "unified", "."] {
        let Ok(list) = std::fs::read_dir(format!("/sys/fs/cgroup/{controller}")) else { continue };
        for entry in list.flatten() {
            let name = entry.file_name().into_string().unwrap();
            assert!(!name.starts_with(&pattern), "{controller}/{name}");
        }
    }
}

fn a_forked_child_of_main_harms_nothing() {
    let mut echo = Echo::start(&restartable()).unwrap();
    // SAFETY: the process has one thread, so the child finds no lock held.
    match unsafe { libc::fork() } {
        0 => {
            drop(echo);
            // SAFETY: the call takes a number and ends the child, so that nothing of the parent's runs in it.
            unsafe { libc::_exit(0) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: the kernel writes one `int` to `status`, which outlives the call.
            unsafe { libc::waitpid(pid, &raw mut status, 0) };
            assert_eq!(status, 0);
        }
    }
    assert_eq!(echo.ask(b"=unharmed").unwrap(), b"unharmed");
}

/// Makes system calls fail as they do on kernels that lack them.
fn without(calls: &[libc::c_long]) -> bool {
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let (load, equal, give) = (0x20, 0x15, 0x06);
    let missing = libc::SECCOMP_RET_ERRNO | libc::ENOSYS.unsigned_abs();
    let mut program = vec![step(load, 0, 0, 0)];
    for call in calls {
        program.push(step(equal, 0, 1, u32::try_from(*call).unwrap()));
        program.push(step(give, 0, 0, missing));
    }
    program.push(step(give, 0, 0, libc::SECCOMP_RET_ALLOW));
    let program =
        libc::sock_fprog { len: u16::try_from(program.len()).unwrap(), filter: program.as_mut_ptr() };
    // SAFETY: the program and its length are those of a vector that lives on; the process is this case's own.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
    }
}

fn older_kernels_are_served() {
    if !without(&[libc::SYS_futex_waitv, libc::SYS_close_range, libc::SYS_set_robust_list]) {
        orrery_testing::skipped!("no seccomp filter to be had");
        return;
    }
    messages_come_back();
    an_end_is_noticed();
    a_killed_sleeper_is_noticed_at_once();
    descriptors_are_closed();
    instances_follow_one_another();
}
