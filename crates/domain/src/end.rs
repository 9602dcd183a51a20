//! How a process ended.

use core::fmt;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It called exit(3) or the like.
    Exited {
        /// With this status.
        status: i32,
    },
    /// A signal ended it.
    Killed {
        /// The number of the signal.
        signal: i32,
    },
    /// It is gone, and another process took its status.
    Unknown,
}

impl End {
    /// Returns whether it ended other than by exit status 0.
    pub fn is_crash(self) -> bool {
        self != Self::Exited { status: 0 }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Exited { status } => write!(f, "it exited with status {status}"),
            Self::Killed { signal } => write!(f, "it was killed by {}", signal_name(signal)),
            Self::Unknown => f.write_str("it is gone, and its status was taken by somebody else"),
        }
    }
}

/// Returns the name of a signal, `SIGSEGV` for 11.
pub fn signal_name(signal: i32) -> String {
    const NAMES: [&str; 31] = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
        "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
        "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
    ];
    usize::try_from(signal)
        .ok()
        .and_then(|number| NAMES.get(number.checked_sub(1)?))
        .map_or_else(|| format!("signal {signal}"), |name| format!("SIG{name}"))
}
