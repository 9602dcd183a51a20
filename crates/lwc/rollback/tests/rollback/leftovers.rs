//! What a rollback does not undo: the second table of the book's chapter, row by row. A row whose test fails has been
//! mended, or was never right, and the book is to say so.

use orrery_rollback::Outcome;
use orrery_sys::signals;

use super::common::rollback;

/// A setting of the process: what the book calls it, a way to change it, and its value.
struct Setting {
    name: &'static str,
    /// Changes it; false where that is not allowed or not there.
    change: fn() -> bool,
    value: fn() -> i64,
}

fn prctl(option: i32, arguments: [u64; 2]) -> i64 {
    // SAFETY: the options that are used take numbers, and change nothing that the test relies on.
    i64::from(unsafe { libc::prctl(option, arguments[0], arguments[1], 0, 0) })
}

/// A system call that takes numbers.
fn call(number: i64, arguments: [i64; 4]) -> i64 {
    let [first, second, third, fourth] = arguments;
    // SAFETY: those that are used read and write at most what the caller has passed, which lives. Calls of five arguments
    // get a zero for the fifth.
    unsafe { libc::syscall(number, first, second, third, fourth, 0_i64, 0_i64) }
}

fn write(path: &str, text: &str) -> bool {
    std::fs::write(path, text).is_ok()
}

/// The number of a file that has one, of whatever base; a hash of its text else.
fn number_in(path: &str) -> i64 {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.bytes().fold(7, |sum, byte| (sum * 31 + i64::from(byte)) % 1_000_003)
}

const JOIN_SESSION_KEYRING: i64 = 1;
const ARCH_SET_GS: i64 = 0x1001;
const ARCH_GET_GS: i64 = 0x1004;
const RSEQ_SIGNATURE: i64 = 0x5305_3053;
const PR_SET_MDWE: i32 = 65;
const PR_SET_MEMORY_MERGE: i32 = 67;

fn address_of<T>(value: &mut T) -> i64 {
    i64::try_from(std::ptr::from_mut(value).expose_provenance()).unwrap()
}

fn rseq(flags: i64) -> i64 {
    let area = orrery_sys::rseq::area().unwrap_or(0);
    let length = i64::try_from(orrery_sys::rseq::LENGTH).unwrap();
    call(libc::SYS_rseq, [i64::try_from(area).unwrap(), length, flags, RSEQ_SIGNATURE])
}

const SETTINGS: [Setting; 21] = [
    Setting {
        name: "keyrings",
        change: || call(libc::SYS_keyctl, [JOIN_SESSION_KEYRING, 0, 0, 0]) > 0,
        value: || call(libc::SYS_keyctl, [0, -3, 0, 0]),
    },
    Setting {
        name: "refusal to make memory executable (`PR_SET_MDWE`)",
        change: || prctl(PR_SET_MDWE, [1, 0]) == 0,
        value: || prctl(PR_SET_MDWE + 1, [0, 0]),
    },
    Setting {
        name: "capability bounding set",
        change: || prctl(libc::PR_CAPBSET_DROP, [22, 0]) == 0,
        value: || prctl(libc::PR_CAPBSET_READ, [22, 0]),
    },
    Setting {
        name: "`keepcaps`",
        change: || prctl(libc::PR_SET_KEEPCAPS, [1, 0]) == 0,
        value: || prctl(libc::PR_GET_KEEPCAPS, [0, 0]),
    },
    Setting {
        name: "`securebits`",
        change: || prctl(libc::PR_SET_SECUREBITS, [1 << 2, 0]) == 0,
        value: || prctl(libc::PR_GET_SECUREBITS, [0, 0]),
    },
    Setting {
        name: "`no_new_privs`",
        change: || prctl(libc::PR_SET_NO_NEW_PRIVS, [1, 0]) == 0,
        value: || prctl(libc::PR_GET_NO_NEW_PRIVS, [0, 0]),
    },
    Setting {
        name: "`oom_score_adj`",
        change: || write("/proc/self/oom_score_adj", "501"),
        value: || number_in("/proc/self/oom_score_adj"),
    },
    Setting {
        name: "`coredump_filter`",
        change: || write("/proc/self/coredump_filter", "0x1"),
        value: || number_in("/proc/self/coredump_filter"),
    },
    Setting {
        name: "merging of equal pages (`PR_SET_MEMORY_MERGE`)",
        change: || prctl(PR_SET_MEMORY_MERGE, [1, 0]) == 0,
        value: || prctl(PR_SET_MEMORY_MERGE + 1, [0, 0]),
    },
    Setting {
        name: "huge pages (`PR_SET_THP_DISABLE`)",
        change: || prctl(libc::PR_SET_THP_DISABLE, [1, 0]) == 0,
        value: || prctl(libc::PR_GET_THP_DISABLE, [0, 0]),
    },
    Setting {
        name: "machine checks (`PR_MCE_KILL`)",
        change: || prctl(libc::PR_MCE_KILL, [1, 1]) == 0,
        value: || prctl(libc::PR_MCE_KILL_GET, [0, 0]),
    },
    Setting {
        name: "speculation controls",
        change: || prctl(libc::PR_SET_SPECULATION_CTRL, [0, 4]) == 0,
        value: || prctl(libc::PR_GET_SPECULATION_CTRL, [0, 0]),
    },
    Setting { name: "`PR_SET_IO_FLUSHER`", change: || prctl(57, [1, 0]) == 0, value: || prctl(58, [0, 0]) },
    Setting {
        name: "base of GS",
        change: || call(libc::SYS_arch_prctl, [ARCH_SET_GS, 0x1000, 0, 0]) == 0,
        value: || {
            let mut value = 0_u64;
            call(libc::SYS_arch_prctl, [ARCH_GET_GS, address_of(&mut value), 0, 0]);
            value.cast_signed()
        },
    },
    Setting {
        name: "local descriptor table",
        change: || {
            // `struct user_desc` of a 32-bit data segment.
            let mut entry = [0_u32, 0, 0xf_ffff, 0x51];
            call(libc::SYS_modify_ldt, [1, address_of(&mut entry), 16, 0]) == 0
        },
        value: || {
            let mut entries = [0_u8; 64];
            call(libc::SYS_modify_ldt, [0, address_of(&mut entries), 64, 0])
        },
    },
    Setting {
        name: "rseq(2)",
        change: || rseq(1) == 0,
        // Who is not registered can register, once.
        value: || if rseq(0) == 0 { 1 } else { 0 },
    },
    Setting {
        name: "flags of a default disposition, which have no effect",
        change: || {
            let action = signals::Action { flags: 0x4000_0000, ..signals::Action::default() };
            // SAFETY: the default disposition calls no handler.
            unsafe { signals::set_action(libc::SIGUSR2, &action) }.is_ok()
        },
        value: || signals::action(libc::SIGUSR2).map_or(0, |action| action.flags.cast_signed() as i64),
    },
    Setting {
        name: "CPU affinity",
        change: || {
            let mut one = [1_u64; 1];
            // With one CPU there is nothing to change.
            std::thread::available_parallelism().is_ok_and(|count| count.get() > 1)
                && call(libc::SYS_sched_setaffinity, [0, 8, address_of(&mut one), 0]) == 0
        },
        value: || {
            let mut set = [0_u64; 16];
            call(libc::SYS_sched_getaffinity, [0, 128, address_of(&mut set), 0]);
            set[0].cast_signed()
        },
    },
    Setting {
        name: "scheduling policy",
        change: || {
            let mut parameter = [0_i32; 1];
            call(libc::SYS_sched_setscheduler, [0, libc::SCHED_BATCH.into(), address_of(&mut parameter), 0])
                == 0
        },
        value: || call(libc::SYS_sched_getscheduler, [0; 4]),
    },
    Setting {
        name: "I/O priority",
        change: || call(libc::SYS_ioprio_set, [1, 0, 2 << 13 | 7, 0]) == 0,
        value: || call(libc::SYS_ioprio_get, [1, 0, 0, 0]),
    },
    Setting {
        name: "memory policy",
        change: || {
            let mut node = [1_u64; 1];
            // MPOL_PREFERRED.
            call(libc::SYS_set_mempolicy, [1, address_of(&mut node), 64, 0]) == 0
        },
        value: || {
            let mut mode = [0_i32; 1];
            call(libc::SYS_get_mempolicy, [address_of(&mut mode), 0, 0, 0]);
            mode[0].into()
        },
    },
];

/// Returns whether a run leaves the setting as it made it; none where it cannot be changed here. In a process of its
/// own.
fn stays(setting: &Setting) -> Option<bool> {
    // SAFETY: the case has one thread, so the child finds no lock held.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let mut rollback = rollback();
        rollback.run(|| {}).unwrap();
        let before = (setting.value)();
        let outcome = rollback.run(|| {
            if !(setting.change)() {
                std::process::exit(1);
            }
        });
        let status = match outcome {
            Ok(Outcome::Returned) if (setting.value)() == before => 2,
            Ok(Outcome::Returned) => 3,
            _ => 1,
        };
        // SAFETY: ends the child.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: writes to the status.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert!(libc::WIFEXITED(status), "{}: {status:x}", setting.name);
    match libc::WEXITSTATUS(status) {
        1 => None,
        2 => Some(false),
        3 => Some(true),
        other => panic!("{}: {other}", setting.name),
    }
}

pub(crate) fn what_is_not_undone_is_known() {
    let mut undone = Vec::new();
    for setting in &SETTINGS {
        match stays(setting) {
            None => println!("SKIPPED: {}: it cannot be changed here", setting.name),
            Some(true) => {}
            Some(false) => undone.push(setting.name),
        }
    }
    assert_eq!(undone, [""; 0], "these are undone, or were not changed");
}
