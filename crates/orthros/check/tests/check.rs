//! This test program holds what survives and what does not, and is looked at.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::fs::{self, File};
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::process::{Command, Stdio};

use orrery_orthros_check::{Finding, Verdict, check};

fn own(fd: i32) -> OwnedFd {
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the callers pass a descriptor that the kernel just made, and nobody else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn of(pid: u32) -> Vec<Finding> {
    check(i32::try_from(pid).unwrap()).unwrap().findings
}

fn about(findings: &[Finding], number: i32) -> Option<&Finding> {
    let name = format!("descriptor {number} (");
    findings.iter().find(|finding| finding.object.starts_with(&name))
}

#[test]
fn what_survives_is_not_told_and_what_does_not_is() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let pair = UnixStream::pair().unwrap();
    // SAFETY: new descriptors, for which nothing is needed.
    let (netlink, event, memfd) = unsafe {
        (
            own(libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, 0)),
            own(libc::eventfd(0, 0)),
            own(libc::memfd_create(c"held".as_ptr(), 0)),
        )
    };
    let namespace = File::open("/proc/self/ns/net").unwrap();
    let mut ends = [0; 2];
    // SAFETY: the array has room for two descriptors.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    let (read, write) = (own(ends[0]), own(ends[1]));
    let findings = of(std::process::id());
    for fine in [
        client.as_raw_fd(),
        pair.0.as_raw_fd(),
        pair.1.as_raw_fd(),
        event.as_raw_fd(),
        memfd.as_raw_fd(),
        read.as_raw_fd(),
    ] {
        assert_eq!(about(&findings, fine), None);
    }
    assert_eq!(about(&findings, netlink.as_raw_fd()).unwrap().verdict, Verdict::HungUp);
    assert_eq!(about(&findings, namespace.as_raw_fd()).unwrap().verdict, Verdict::HungUp);
    let waiting = about(&findings, listener.as_raw_fd()).unwrap();
    assert!(waiting.verdict == Verdict::Lost && waiting.why.contains("1 connections"), "{waiting:?}");
    drop(write);
    // Children that other tests are just starting have it for a moment, too.
    let told = (0..200).find_map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        about(&of(std::process::id()), read.as_raw_fd()).cloned()
    });
    assert_eq!(told.unwrap().verdict, Verdict::Lost);
    for finding in &findings {
        assert!(!finding.why.is_empty() && !finding.way_out.is_empty() && !finding.process.is_empty());
    }
}

/// A timer by the processor time of the calling thread, as servers have to notice that a thread hangs, and one by that of the process.
#[test]
fn timers_by_own_processor_time_are_passed_over() {
    let mut own = 0;
    // SAFETY: the C library writes one clock's number to `own`, which outlives the call.
    assert_eq!(unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &raw mut own) }, 0);
    for clock in [own, libc::CLOCK_PROCESS_CPUTIME_ID, libc::CLOCK_THREAD_CPUTIME_ID] {
        let mut timer = std::ptr::null_mut();
        // SAFETY: without an event the timer would send SIGALRM, but it is not set; the call writes its ID.
        assert_eq!(unsafe { libc::timer_create(clock, std::ptr::null_mut(), &raw mut timer) }, 0, "{clock}");
    }
    let findings = of(std::process::id());
    assert!(findings.iter().all(|finding| finding.object != "timers"), "{findings:?}");
}

#[test]
fn a_listener_of_mptcp_is_told_by_its_name() {
    // SAFETY: the call takes numbers only.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_MPTCP) };
    if socket < 0 {
        orrery_testing::skipped!("this kernel has no MPTCP");
        return;
    }
    let socket = own(socket);
    // SAFETY: the call takes numbers only, and the socket is open.
    assert_eq!(unsafe { libc::listen(socket.as_raw_fd(), 5) }, 0);
    let told = about(&of(std::process::id()), socket.as_raw_fd()).cloned().unwrap();
    assert!(told.verdict == Verdict::HungUp && told.why.contains("MPTCP"), "{told:?}");
}

#[test]
fn a_socket_whose_other_side_is_another_programs_is_told() {
    // The child has one side of each, as its standard streams; this program the other.
    let (inner, _outer) = UnixStream::pair().unwrap();
    let (device, full) = (File::open("/dev/full").unwrap(), Stdio::null());
    let mut child = Command::new("sleep")
        .arg("1000")
        .stdin(OwnedFd::from(inner))
        .stdout(device)
        .stderr(full)
        .spawn()
        .unwrap();
    let findings = of(child.id());
    let told = about(&findings, 0);
    match told {
        Some(told) => assert!(told.verdict == Verdict::HungUp && told.why.contains("another"), "{told:?}"),
        None => orrery_testing::skipped!("this kernel does not tell who is connected to whom"),
    }
    assert_eq!((about(&findings, 1), about(&findings, 2)), (None, None));
    let report = check(i32::try_from(child.id()).unwrap()).unwrap();
    assert!(report.survives && report.processes == 1 && report.descriptors >= 3, "{report:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(
        check(i32::try_from(child.id()).unwrap()).unwrap_err().to_string().contains("cannot find process")
    );
}

#[test]
fn memory_that_cannot_be_made_again_refuses_and_what_loses_its_name_is_told() {
    // SAFETY: a new piece of memory, which goes when this program does.
    let has_memory = unsafe {
        let id = libc::shmget(libc::IPC_PRIVATE, 4096, 0o600);
        libc::shmat(id, std::ptr::null(), 0);
        libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut());
        id >= 0
    };
    if !has_memory {
        orrery_testing::skipped!("no System V memory here");
        return;
    }
    let report = check(i32::try_from(std::process::id()).unwrap()).unwrap();
    let told = report.findings.iter().find(|finding| finding.object.contains("SYSV")).unwrap();
    assert!(told.verdict == Verdict::Lost && told.why.contains("number"), "{told:?}");

    // A program whose file was removed while it runs: it is carried over with what it holds.
    let program = std::env::temp_dir().join(format!("orthros-check-program-{}", std::process::id()));
    orrery_testing::copy_program("/bin/sleep", &program);
    let mut child = Command::new(&program).arg("1000").stdin(Stdio::null()).spawn().unwrap();
    // Its maps, since the link `exe` is there before the program is mapped.
    let name = program.to_str().unwrap();
    while !fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap().contains(name) {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    fs::remove_file(&program).unwrap();
    let report = check(i32::try_from(child.id()).unwrap()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(report.survives, "{:?}", report.findings);
}

#[test]
fn children_are_looked_at_too_and_a_deleted_file_is_not_passed_over() {
    let path = std::env::temp_dir().join(format!("orthros-check-{}", std::process::id()));
    let mut file = File::create_new(&path).unwrap();
    file.write_all(&[7; 8192]).unwrap();
    file.sync_all().unwrap();
    fs::remove_file(&path).unwrap();
    let script = "sleep 1000 & wait";
    let mut child = Command::new("sh")
        .args(["-c", script])
        .stdin(file)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // The shell forks, and gives its child another standard input before that executes the program.
    let list = format!("/proc/{0}/task/{0}/children", child.id());
    let executed = || {
        let children = fs::read_to_string(&list).unwrap_or_default();
        let name = |pid: &str| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        children.split_whitespace().any(|pid| name(pid).trim() == "sleep")
    };
    orrery_testing::eventually("the program is executed", executed);
    let report = check(i32::try_from(child.id()).unwrap()).unwrap();
    assert_eq!(report.processes, 2);
    // On an ext4 it survives; elsewhere it may not be written back.
    let told = about(&report.findings, 0);
    assert!(told.is_none_or(|told| told.why.contains("ext4")), "{told:?}");
    let large = File::create_new(&path).unwrap();
    large.set_len(65 << 20).unwrap();
    fs::remove_file(&path).unwrap();
    let findings = of(std::process::id());
    let told = about(&findings, large.as_raw_fd()).unwrap();
    assert!(told.verdict == Verdict::Refused && told.why.contains("too large"), "{told:?}");
    let inner = report.findings.iter().map(|finding| finding.pid).max();
    assert!(inner.is_none_or(|pid| pid >= i32::try_from(child.id()).unwrap()));
    let children = fs::read_to_string(&list).unwrap_or_default();
    child.kill().unwrap();
    child.wait().unwrap();
    for pid in children.split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()) {
        // SAFETY: no pointers are involved; it was this test's grandchild.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}

#[test]
fn listeners_with_names_and_datagrams_survive() {
    let directory = std::env::temp_dir().join(format!("orthros-check-sockets-{}", std::process::id()));
    fs::create_dir(&directory).unwrap();
    let listener = UnixListener::bind(directory.join("listener")).unwrap();
    let datagram = UnixDatagram::bind(directory.join("datagram")).unwrap();
    let findings = of(std::process::id());
    assert_eq!(
        (about(&findings, listener.as_raw_fd()), about(&findings, datagram.as_raw_fd())),
        (None, None)
    );
    fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_process_that_shares_memory_is_told() {
    extern "C" fn wait(_: *mut libc::c_void) -> libc::c_int {
        // SAFETY: the call takes no pointer.
        unsafe { libc::pause() }
    }
    // Never freed, as the child has it as long as it lives.
    let stack: &'static mut [u128] = Box::leak(vec![0; 4096].into_boxed_slice());
    let flags = libc::CLONE_VM | libc::CLONE_FILES | libc::SIGCHLD;
    // SAFETY: the child has a stack of its own, and only makes a system call on it.
    let child =
        unsafe { libc::clone(wait, stack.as_mut_ptr_range().end.cast(), flags, std::ptr::null_mut()) };
    assert!(child > 0, "{}", std::io::Error::last_os_error());
    let own = std::process::id();
    let findings = of(own);
    // SAFETY: no pointers but a null one are involved; it is this test's child.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    let of_child = |object: &str| {
        findings
            .iter()
            .find(|finding| finding.pid == child && finding.object == object)
            .map(|found| found.verdict)
    };
    assert_eq!(of_child("memory"), Some(Verdict::Refused), "{findings:?}");
    assert_eq!(of_child("file descriptors"), Some(Verdict::Lost), "{findings:?}");
    assert_eq!(of_child("directories and umask"), None, "{findings:?}");
}

#[test]
fn what_guests_processors_lack_is_told() {
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let report = check(i32::try_from(std::process::id()).unwrap()).unwrap();
    for feature in ["ssse3", "aes", "avx2"] {
        assert_eq!(
            report.beyond_guests.iter().any(|one| one == feature),
            flags.split_ascii_whitespace().any(|flag| flag == feature),
            "{feature}: {:?}",
            report.beyond_guests
        );
    }
    if !flags.split_ascii_whitespace().any(|flag| flag == "sse4_2") {
        orrery_testing::skipped!("this processor cannot run what is built for x86-64-v2");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // GNU_PROPERTY_X86_ISA_1_NEEDED, which linkers make where they are asked to; some fail at that.
    for (level, refused) in [(1, false), (2, true)] {
        let program = directory.path().join(format!("level-{level}"));
        let source = format!(
            "#include <unistd.h>\n\
             __asm__(\".section .note.gnu.property, \\\"a\\\"\\n.p2align 3\\n.long 4, 16, 5\\n.asciz \\\"GNU\\\"\\n\"\n\
             \".long 0xc0008002, 4, {level}, 0\\n.previous\");\n\
             int main(void) {{ return pause(); }}\n"
        );
        let mut compiler = Command::new("cc");
        compiler.args(["-fcf-protection=none", "-x", "c", "-", "-o"]).arg(&program).stdin(Stdio::piped());
        let mut compiler = compiler.spawn().unwrap();
        compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
        assert!(compiler.wait().unwrap().success());
        let mut child = Command::new(&program).spawn().unwrap();
        let name = format!("code of {}", program.display());
        let is_found = || of(child.id()).into_iter().find(|finding| finding.object == name);
        // Until the loader has mapped all, the program itself is there.
        let found = is_found();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(
            found.as_ref().map(|finding| finding.verdict),
            refused.then_some(Verdict::Refused),
            "{found:?}"
        );
        assert!(found.is_none_or(|finding| finding.why.contains("x86-64-v2")));
    }
}
