//! What else a process is, that rollback does not restore: who it is, where it runs, what it has forsworn.
//!
//! [`ROWS`] is one table of it. A row that has changed is set back, if it can be; a worker in which one cannot is
//! replaced. Rows are compared one after the other, without the heap: what is written between requests has to be
//! captured again.

mod rows;

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use orrery_rollback::Status;
use orrery_sys::process::WholeFile;
use rustix::fs::{Mode, OFlags};

use rows::ROWS;

/// What a row is, as numbers to compare.
type Value = [u64; 16];

/// One attribute of a process.
struct Row {
    /// For the message to the server's user.
    name: &'static str,
    read: fn(&View<'_>) -> Value,
    /// Sets it back, where that can be done; whether it helped is found out by reading it again.
    set: Option<fn(&View<'_>, &Value)>,
}

/// Files of `/proc/self`, opened while the worker could still open them.
#[derive(Debug)]
pub(super) struct Files {
    namespaces: OwnedFd,
    /// None where the rollback engine has one open, which it reads after each script.
    status: Option<WholeFile>,
    cgroup: Option<OwnedFd>,
    oom_score_adj: Option<OwnedFd>,
    coredump_filter: Option<OwnedFd>,
    autogroup: Option<OwnedFd>,
}

impl Files {
    /// Opens them, in a process that has the rollback engine.
    pub(super) fn open() -> rustix::io::Result<Self> {
        let open = |path: &CStr, flags| {
            let fd = rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?;
            rustix::io::fcntl_dupfd_cloexec(&fd, crate::descriptors::first_reserved())
        };
        // A kernel without the file does not have the attribute, either.
        let writable = |path| open(path, OFlags::RDWR).or_else(|_| open(path, OFlags::RDONLY)).ok();
        Ok(Self {
            namespaces: open(c"/proc/self/ns", OFlags::PATH | OFlags::DIRECTORY)?,
            status: None,
            cgroup: open(c"/proc/self/cgroup", OFlags::RDONLY).ok(),
            oom_score_adj: writable(c"/proc/self/oom_score_adj"),
            coredump_filter: writable(c"/proc/self/coredump_filter"),
            autogroup: writable(c"/proc/self/autogroup"),
        })
    }

    /// Opens them in a process that has no engine.
    #[cfg(test)]
    fn without_engine() -> Self {
        let thread = rustix::thread::gettid().as_raw_pid();
        Self { status: Some(WholeFile::status(thread).unwrap()), ..Self::open().unwrap() }
    }
}

/// The files, and what one of them says now.
struct View<'a> {
    files: &'a Files,
    status: Status,
}

impl<'a> View<'a> {
    fn new(files: &'a Files) -> Self {
        let status = match &files.status {
            Some(file) => file.read(),
            None => orrery_rollback::status(),
        };
        Self { files, status }
    }

    /// Returns what the engine saw when the last script was undone, and could not change anything any more.
    fn of_last_restore(files: &'a Files) -> Self {
        match files.status {
            Some(_) => Self::new(files),
            None => Self { files, status: orrery_rollback::last_status() },
        }
    }

    /// Returns the lines of the status file that begin as in [`SHOWN`]; `None` where they are not known to be all.
    fn shown(&self) -> Option<Text> {
        let bytes = self.status.whole()?;
        let mut shown = Text::EMPTY;
        let mut rest = bytes;
        while !rest.is_empty() {
            let end = memchr::memchr(b'\n', rest).map_or(rest.len(), |end| end + 1);
            let (line, others) = rest.split_at(end);
            if SHOWN.iter().any(|(start, _)| line.starts_with(start)) {
                shown.bytes[shown.length..][..end].copy_from_slice(line);
                shown.length += end;
            }
            rest = others;
        }
        Some(shown)
    }
}

/// Lines of the status file that begin so show the row as a whole: while they are as they were, it is.
///
/// User and group ids are shown as the user namespace has them in which the file was opened, so they are known to be the
/// same only while that is the process' own: the row of namespaces has it. The lines of session and process group are
/// there where the kernel has PID namespaces.
const SHOWN: [(&[u8], &str); 16] = [
    (b"Uid:", "users"),
    (b"Gid:", "groups"),
    (b"NSpgid:", "session"),
    (b"NSsid:", "session"),
    (b"Groups:", "supplementary groups"),
    (b"CapInh:", "capabilities"),
    (b"CapPrm:", "capabilities"),
    (b"CapEff:", "capabilities"),
    (b"CapBnd:", "capability bounding set"),
    (b"CapAmb:", "ambient capabilities"),
    (b"NoNewPrivs:", "no_new_privs"),
    (b"Seccomp", "system call filter"),
    (b"Speculation", "speculation control"),
    (b"x86_Thread_features", "shadow stack and the like"),
    (b"Cpus_allowed:", "processors"),
    (b"Mems_allowed:", "memory nodes"),
];

/// The beginning of a file.
#[derive(Clone)]
struct Text {
    bytes: [u8; 4096],
    length: usize,
}

impl std::fmt::Debug for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        String::from_utf8_lossy(self.bytes()).fmt(f)
    }
}

impl Text {
    const EMPTY: Self = Self { bytes: [0; 4096], length: 0 };

    fn of(file: Option<&OwnedFd>) -> Self {
        let mut text = Self::EMPTY;
        if let Some(file) = file {
            text.length = rustix::io::pread(file, &mut text.bytes, 0).unwrap_or(0);
        }
        text
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

/// The attributes.
#[derive(Clone, Debug)]
pub(super) struct Attributes {
    values: [Value; ROWS.len()],
    /// What the status file shows, and of which rows it shows something.
    shown: Option<Text>,
    is_shown: [bool; ROWS.len()],
    /// Whether the kernel has the security module that says who may trace a process; it comes with the kernel's start.
    has_yama: bool,
}

impl Attributes {
    /// Returns what the process is now.
    pub(super) fn capture(files: &Files) -> Self {
        let view = View::new(files);
        let shown = view.shown();
        let is_there = |start: &[u8]| {
            let lines = shown.as_ref().map_or(&[][..], Text::bytes).split(|&byte| byte == b'\n');
            lines.clone().any(|line| line.starts_with(start))
        };
        let is_shown = ROWS.map(|row| SHOWN.iter().any(|(start, name)| *name == row.name && is_there(start)));
        Self { values: ROWS.map(|row| (row.read)(&view)), is_shown, shown, has_yama: rows::set_tracer() }
    }

    /// Sets back what has changed.
    ///
    /// # Errors
    /// What cannot be set back.
    pub(super) fn restore(&self, files: &Files) -> Result<(), String> {
        rows::set_what_cannot_be_read(self.has_yama);
        let mut view = View::of_last_restore(files);
        let before = self.shown.as_ref().map(Text::bytes);
        let as_before = before.is_some() && view.shown().as_ref().map(Text::bytes) == before;
        let mut kept = Vec::new();
        for ((row, value), is_shown) in ROWS.iter().zip(&self.values).zip(self.is_shown) {
            if as_before && is_shown || (row.read)(&view) == *value {
                continue;
            }
            if let Some(set) = row.set {
                set(&view, value);
                view = View::new(files);
            }
            if (row.read)(&view) != *value {
                kept.push(row.name);
            }
        }
        if kept.is_empty() { Ok(()) } else { Err(format!("changed for good: {}", kept.join(", "))) }
    }
}

#[cfg(test)]
mod tests;
