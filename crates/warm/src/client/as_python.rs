//! A process that behaves as `python3` would behave in its place.
//!
//! Signals that reach it go on to the program; when the program ends, it ends likewise: with the same status, or by
//! the same signal. Its own failures have statuses of their own, of which `python3` uses none:
//!
//! | status | meaning |
//! |---|---|
//! | 69 | no server listens (`EX_UNAVAILABLE`) |
//! | 70 | the server was lost while the program ran (`EX_SOFTWARE`) |
//! | 71 | this process could not open what it needs (`EX_OSERR`) |
//! | 75 | the server is busy (`EX_TEMPFAIL`) |
//! | 76 | the server does not understand, or refuses (`EX_PROTOCOL`) |
//! | 123 | the program exceeded the memory limit |
//! | 124 | the program exceeded the time limit, as `timeout(1)` has it |

use std::ffi::{CString, OsString};
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicI64, Ordering};

use rustix::io::Errno;

use super::{Client, Error, Job, Source};
use crate::die::die_by_signal;
use crate::protocol::{self, Outcome};

/// Signals that go on to the program unless they were ignored when the client started.
const FORWARDED: [i32; 9] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGTSTP,
    libc::SIGCONT,
];

/// The connection on which the signal handler sends; -1 before there is one.
static CONNECTION: AtomicI32 = AtomicI32::new(-1);

/// Whether the request may not have been sent as a whole, and the signal that came meanwhile.
static SENDING: AtomicBool = AtomicBool::new(false);
static PENDING: AtomicI32 = AtomicI32::new(0);

/// When the oldest signal was sent that may not have been read, in seconds of the monotonic clock; -1 for none.
static UNREAD_SINCE: AtomicI64 = AtomicI64::new(-1);

/// How long a program may take to notice a signal.
const NOTICE_SECONDS: i64 = 1;

/// How a stand-in is to behave.
#[derive(Debug)]
pub struct AsPython<'a> {
    /// Where the server is.
    pub client: Client,
    /// The program to run and its options.
    pub job: Job<'a>,
    /// The `python3` command to become where the server cannot help, if that is wanted.
    pub fallback: Option<Vec<OsString>>,
}

/// Runs the job and ends this process as `python3` would have ended. Call it in a process of one thread.
pub fn run_as_python(options: AsPython<'_>) -> ! {
    let AsPython { client, job, fallback } = options;
    // What this process ignores, the program ignores. Rust's runtime ignores SIGPIPE, but so does python3.
    let ignored = ignored_signals();
    let job = job.ignored_signals(ignored & !(1 << (libc::SIGPIPE - 1)));
    if let Err(errno) = job.open_script() {
        exit_with_script_error(&job, errno);
    }
    forward_signals(ignored);
    let answer = client.run_with(
        &job,
        |connection| {
            SENDING.store(true, Ordering::Relaxed);
            UNREAD_SINCE.store(-1, Ordering::Relaxed);
            CONNECTION.store(connection.as_raw_fd(), Ordering::Relaxed);
        },
        |_| {
            SENDING.store(false, Ordering::Relaxed);
            match PENDING.swap(0, Ordering::Relaxed) {
                0 => {}
                signal => forward(signal),
            }
        },
    );
    CONNECTION.store(-1, Ordering::Relaxed);
    if let Some(command) = fallback
        && matches!(
            answer,
            Err(Error::NoServer { .. } | Error::Busy { .. })
                | Ok(protocol::Answer { outcome: Outcome::Refused(_), .. })
        )
    {
        become_python(&command);
    }
    match answer {
        Ok(answer) => exit_like(&answer.outcome),
        Err(error) => {
            let status = exit_status(&error);
            print_error(&format!("{:#}", anyhow::Error::from(error)));
            std::process::exit(status);
        }
    }
}

/// Returns the exit status for a failure of the client.
#[must_use]
pub fn exit_status(error: &Error) -> i32 {
    match error {
        Error::NoServer { .. } => 69,
        Error::ServerLost | Error::NotReloaded { .. } => 70,
        Error::Io { .. } => 71,
        Error::Busy { .. } | Error::NotBegun { .. } => 75,
        Error::Protocol(_) => 76,
    }
}

fn exit_like(outcome: &Outcome) -> ! {
    let status = match outcome {
        Outcome::Exited(status) => i32::from(*status),
        Outcome::Signaled(signal) => die_by_signal(*signal),
        Outcome::TimedOut { limit } => {
            print_error(&format!(
                "the program was ended: it ran longer than {limit:?}, the server's --timeout"
            ));
            124
        }
        Outcome::MemoryLimit { limit } => {
            print_error(&format!(
                "the program was ended: it needed more than {limit} bytes, the server's --memory"
            ));
            123
        }
        Outcome::Cancelled => {
            print_error("the program was ended, because its client seemed to have gone");
            70
        }
        Outcome::Refused(reason) => {
            print_error(reason);
            76
        }
    };
    std::process::exit(status)
}

fn print_error(message: &str) {
    // A closed standard error leaves the exit status to speak.
    let _ = writeln!(io::stderr(), "orrery: {message}");
}

/// As `pymain_run_file_obj` of CPython words it.
fn exit_with_script_error(job: &Job<'_>, errno: Errno) -> ! {
    let (status, message) = match (job.source(), errno) {
        (_, Errno::MFILE | Errno::NFILE | Errno::NOMEM)
        | (Source::Command(_) | Source::Module(_) | Source::Stdin { .. }, _) => {
            (71, format!("orrery: opening the script: {}\n", io::Error::from(errno)))
        }
        (Source::Script(path), _) => {
            let mut name = path.as_bytes().to_vec();
            if !name.starts_with(b"/")
                && let Ok(directory) = rustix::process::getcwd(Vec::new())
            {
                name = [directory.as_bytes(), b"/", &name].concat();
            }
            (
                2,
                format!(
                    "python3: can't open file {}: [Errno {}] {}\n",
                    quoted(&name),
                    errno.raw_os_error(),
                    text(errno)
                ),
            )
        }
    };
    // As in `say`.
    let _ = io::stderr().write_all(message.as_bytes());
    std::process::exit(status)
}

/// Returns a file name as Python's `repr` shows it.
fn quoted(name: &[u8]) -> String {
    let quote = if name.contains(&b'\'') && !name.contains(&b'"') { '"' } else { '\'' };
    let mut text = String::from(quote);
    for chunk in name.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\\' => text.push_str("\\\\"),
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                control if control < ' ' || control == '\x7f' => {
                    text.push_str(&format!("\\x{:02x}", u32::from(control)))
                }
                other if other == quote => text.extend(['\\', other]),
                other => text.push(other),
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\udc{byte:02x}"));
        }
    }
    text.push(quote);
    text
}

fn text(errno: Errno) -> String {
    let mut buffer = [0_u8; 256];
    // SAFETY: pointer and length are an array's; the text is terminated (POSIX strerror_r, which libc declares).
    unsafe { libc::strerror_r(errno.raw_os_error(), buffer.as_mut_ptr().cast(), buffer.len()) };
    let text = buffer.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// Becomes the interpreter that `command` names, with its arguments. Exits with 127 where it cannot.
pub fn become_python(command: &[OsString]) -> ! {
    for &signal in &FORWARDED {
        // SAFETY: a signal number and the default action.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let strings: Vec<CString> =
        command.iter().filter_map(|word| CString::new(word.as_bytes()).ok()).collect();
    let mut pointers: Vec<_> = strings.iter().map(|string| string.as_ptr()).collect();
    pointers.push(std::ptr::null());
    // SAFETY: an array of C strings ended by a null; `strings` outlives the call.
    unsafe { libc::execvp(pointers[0], pointers.as_ptr()) };
    print_error(&format!(
        "starting {}: {}",
        command.first().map_or("".into(), |word| word.to_string_lossy()),
        io::Error::last_os_error()
    ));
    std::process::exit(127)
}

/// Bit N-1 for every signal N that this process ignores.
fn ignored_signals() -> u64 {
    (1..=64).filter(|&signal| is_ignored(signal)).fold(0, |mask, signal| mask | 1 << (signal - 1))
}

fn is_ignored(signal: i32) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the pointer is to a live local, which the call fills when it answers 0.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

fn forward_signals(ignored: u64) {
    for &signal in FORWARDED.iter().filter(|&&signal| ignored & (1 << (signal - 1)) == 0) {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: a zeroed sigaction is a valid one; the handler is async-signal-safe.
        unsafe {
            let action = action.assume_init_mut();
            action.sa_sigaction = forward as extern "C" fn(i32) as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, action, std::ptr::null_mut());
        }
    }
}

/// Returns whether the other side has not read all that was sent: no worker has taken the request yet, or the program
/// takes no signals.
fn is_unread(connection: i32) -> bool {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the kernel writes one number; ioctl(2) is a plain system call here (SIOCOUTQ, whose number is TIOCOUTQ's).
    unsafe { libc::ioctl(connection, libc::TIOCOUTQ, &raw mut bytes) == 0 && bytes > 0 }
}

/// Sends the signal's number to the program; a stop signal stops this process too. The signal has its default effect where
/// there is no program, as none was taken by a worker yet, and where the one before it has not been noticed for
/// [`NOTICE_SECONDS`].
extern "C" fn forward(signal: i32) {
    let connection = CONNECTION.load(Ordering::Relaxed);
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic).tv_sec;
    let unread = is_unread(connection);
    if connection != -1 && !unread && SENDING.load(Ordering::Relaxed) {
        // A byte before the request would be no signal; the program may run already, though.
        PENDING.store(signal, Ordering::Relaxed);
        return;
    }
    let unnoticed = if unread {
        // Nothing was sent before but the request, or a signal at that time.
        let before = UNREAD_SINCE.load(Ordering::Relaxed);
        before == -1 || now - before > NOTICE_SECONDS
    } else {
        UNREAD_SINCE.store(now, Ordering::Relaxed);
        false
    };
    let stops = signal == libc::SIGTSTP || signal == libc::SIGCONT;
    if !stops && (connection == -1 || unnoticed) {
        die_by_signal(signal);
    }
    // SAFETY: errno belongs to this thread; send and raise are async-signal-safe, the byte is a live local.
    unsafe {
        let errno = *libc::__errno_location();
        let byte = u8::try_from(signal).unwrap_or(0);
        let sent =
            libc::send(connection, (&raw const byte).cast(), 1, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT);
        if sent != 1 && !stops && *libc::__errno_location() == libc::EBADF {
            // The connection is closed, and the next one not there yet.
            die_by_signal(signal);
        }
        if signal == libc::SIGTSTP {
            libc::raise(libc::SIGSTOP);
        }
        *libc::__errno_location() = errno;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_as_python_quotes_them() {
        assert_eq!(quoted(b"/a b.py"), "'/a b.py'");
        assert_eq!(quoted(b"it's"), "\"it's\"");
        assert_eq!(quoted(b"it's \"x\""), "'it\\'s \"x\"'");
        assert_eq!(quoted(b"\xff\n\\"), "'\\udcff\\n\\\\'");
        assert_eq!(text(Errno::NOENT), "No such file or directory");
    }
}
