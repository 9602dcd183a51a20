//! Programs whose system calls are filtered, in whatever way: they run as they would without a store.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output};

use crate::Store;
use crate::guest::{Guest, TALK, Workshop, variables};

/// Every system call that the auditor makes and that a program's start can do without.
const OURS: [(&str, libc::c_long); 17] = [
    ("socket", libc::SYS_socket),
    ("connect", libc::SYS_connect),
    ("getsockopt", libc::SYS_getsockopt),
    ("setsockopt", libc::SYS_setsockopt),
    ("sendmsg", libc::SYS_sendmsg),
    ("recvmsg", libc::SYS_recvmsg),
    ("fcntl", libc::SYS_fcntl),
    ("fstat", libc::SYS_fstat),
    ("statx", libc::SYS_statx),
    ("statfs", libc::SYS_statfs),
    ("getpid", libc::SYS_getpid),
    ("geteuid", libc::SYS_geteuid),
    ("memfd_create", libc::SYS_memfd_create),
    ("fadvise64", libc::SYS_fadvise64),
    ("ioctl", libc::SYS_ioctl),
    ("pread64", libc::SYS_pread64),
    ("lseek", libc::SYS_lseek),
];

/// A filter (seccomp(2)) that answers these calls with `verdict`, and allows all others.
fn filter(calls: &[libc::c_long], verdict: u32) -> Vec<libc::sock_filter> {
    let code = |class: u32| u16::try_from(class).unwrap();
    let step = |class: u32, k: u32| libc::sock_filter { code: code(class), jt: 0, jf: 0, k };
    // The number of the call is the first word that a filter sees.
    let mut filter = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for (index, call) in calls.iter().enumerate() {
        let to_the_verdict = u8::try_from(calls.len() - index).unwrap();
        let k = u32::try_from(*call).unwrap();
        let class = code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K);
        filter.push(libc::sock_filter { code: class, jt: to_the_verdict, jf: 0, k });
    }
    filter.push(step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    filter.push(step(libc::BPF_RET | libc::BPF_K, verdict));
    filter
}

/// Has the program run under a filter from its first instruction on.
fn put_under(command: &mut Command, mut filter: Vec<libc::sock_filter>) {
    let set = move || {
        let program =
            libc::sock_fprog { len: u16::try_from(filter.len()).unwrap(), filter: filter.as_mut_ptr() };
        // SAFETY: two system calls on this process alone, whose arguments live until they are done.
        let set = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0
        };
        if set { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: nothing but system calls happens between fork and exec.
    unsafe { command.pre_exec(set) };
}

/// Returns a program with a library, and one that it loads later; it prints 42.
fn program(workshop: &Workshop) -> std::path::PathBuf {
    let later = workshop.library("liblater.so", "int later(void) { return 30; }", &[]);
    workshop.library("libfirst.so", "int first(void) { return 12; } const char much[300000] = {1};", &[]);
    let source = format!(
        "{TALK} int first(void);
         int main(void) {{
             int (*later)(void) = dlsym(load(\"{}\"), \"later\");
             char text[] = \"42\\n\";
             if (first() + later() == 42) write(1, text, 3);
             _exit(0);
         }}",
        later.display()
    );
    workshop.program("main", &source, &["-L$LIB", "-lfirst", "-Wl,-rpath,$LIB"])
}

fn start(program: &Path, variables: &[(String, String)], filter: &[libc::sock_filter]) -> Option<Output> {
    let mut command = Command::new(program);
    command.env_remove("LD_AUDIT").envs(variables.iter().map(|(name, value)| (name, value)));
    put_under(&mut command, filter.to_vec());
    command.output().ok()
}

fn did_its_work(output: &Output) -> bool {
    output.status.success() && output.stdout == b"42\n"
}

#[test]
fn calls_that_are_denied_are_done_without() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let willing = variables(&store, &["--filtered"]);
    let program = program(&workshop);
    let mut tried = 0;
    for (name, call) in OURS {
        for errno in [libc::EPERM, libc::ENOSYS] {
            let filter = filter(&[call], libc::SECCOMP_RET_ERRNO | u32::try_from(errno).unwrap());
            let Some(plain) = start(&program, &[], &filter) else {
                orrery_testing::skipped!("no filter of system calls can be set here");
                return;
            };
            // Where the program itself cannot do without, there is nothing to be seen.
            if did_its_work(&plain) {
                let output = start(&program, &willing, &filter).unwrap();
                assert!(did_its_work(&output), "{name} answers {errno}: {output:?}");
                tried += 1;
            }
        }
    }
    assert!(tried >= 20, "{tried}");
}

#[test]
fn filters_that_kill_find_nothing_to_kill_for() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let careful = variables(&store, &[]);
    let program = program(&workshop);
    // What no plain program of this kind does.
    let calls =
        OURS.map(|(name, call)| (!["fcntl", "fstat", "pread64", "lseek", "ioctl"].contains(&name), call));
    let calls: Vec<_> = calls.iter().filter(|(is_rare, _)| *is_rare).map(|(_, call)| *call).collect();
    let filter = filter(&calls, libc::SECCOMP_RET_KILL_PROCESS);
    let Some(plain) = start(&program, &[], &filter) else {
        orrery_testing::skipped!("no filter of system calls can be set here");
        return;
    };
    assert!(did_its_work(&plain), "{plain:?}");
    let output = start(&program, &careful, &filter).unwrap();
    assert!(did_its_work(&output), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("its system calls are filtered"), "{said}");
    // Who says that sockets are allowed where they are not is taken at his word: the filter does its work.
    let output = start(&program, &variables(&store, &["--filtered"]), &filter).unwrap();
    assert!(!output.status.success(), "{output:?}");
}

/// Loads the library that its argument names in a thread that a call of statx(2) would kill; it prints 30.
const IN_A_THREAD: &str = r#"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/prctl.h>
static void *loads(void *path) {
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_statx, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {4, steps};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter))
        _exit(77);
    return dlsym(load(path), "later");
}
int main(int count, char **arguments) {
    pthread_t thread;
    void *later;
    if (count != 2 || pthread_create(&thread, NULL, loads, arguments[1]) || pthread_join(thread, &later)) _exit(1);
    char text[] = "30\n";
    if (((int (*)(void))later)() == 30) write(1, text, 3);
    _exit(0);
}
"#;

/// Filters are of threads: the first one's says nothing of the others'.
#[test]
fn a_thread_with_a_filter_of_its_own_is_left_alone() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let later =
        workshop.library("liblater.so", "int later(void) { return 30; } const char much[300000] = {1};", &[]);
    let program = workshop.program("threads", &format!("{TALK}{IN_A_THREAD}"), &["-pthread"]);
    let start = |variables: &[(String, String)]| {
        let mut command = Command::new(&program);
        command.arg(&later).env_remove("LD_AUDIT");
        command.envs(variables.iter().map(|(name, value)| (name, value))).output().unwrap()
    };
    let plain = start(&[]);
    if plain.status.code() == Some(77) {
        orrery_testing::skipped!("no filter of system calls can be set here");
        return;
    }
    assert!(plain.status.success() && plain.stdout == b"30\n", "{plain:?}");
    let output = start(&variables(&store, &[]));
    assert!(output.status.success() && output.stdout == b"30\n", "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("the program filters its system calls"), "{said}");
}

#[test]
fn strict_programs_keep_what_they_have() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let source = format!(
        "{TALK}
         static void tell(void) {{ char c; write(1, \"1\\n\", 2); while (read(0, &c, 1) == 1 && c != '\\n') {{ }} }}
         int main(void) {{
             if (prctl(PR_SET_SECCOMP, 1)) _exit(5);
             tell(); tell();
             syscall(SYS_exit, 0);
         }}"
    );
    let program = workshop.program("strict", &source, &[]);
    let mut guest = Guest::start(&store, &workshop, &program);
    assert_eq!(guest.number(), 1);
    let reasons = guest.reasons("libc.so.6", "r-xp");
    assert!(reasons.iter().all(|reason| reason.starts_with("an object")), "{reasons:?}");
    assert!(guest.summary().contains("filtered (seccomp)"), "{}", guest.summary());
    // The store's death is none of its business.
    crate::signal(store.server(), libc::SIGKILL);
    assert_eq!(guest.go_on(), 1);
}
