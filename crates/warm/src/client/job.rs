//! A program to run, and how it travels.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fs::{Mode, OFlags};

use super::{Error, io_error};
use crate::protocol::{self, Options, Program, Request, RequestId};

/// Where the program's text is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file, a directory or archive with a `__main__.py`.
    Script(OsString),
    /// The text after `-c`.
    Command(OsString),
    /// The name after `-m`.
    Module(OsString),
    /// On standard input; whether a `-` said so.
    Stdin {
        /// Whether a `-` said so.
        dash: bool,
    },
}

/// A program, its arguments and surroundings.
///
/// Surroundings that are not set are this process' own, as they are when the job is sent.
#[derive(Debug)]
pub struct Job<'a> {
    source: Source,
    arguments: Vec<OsString>,
    environment: Option<Vec<u8>>,
    directory: Option<BorrowedFd<'a>>,
    streams: [Option<BorrowedFd<'a>>; 3],
    /// Options of the interpreter.
    unbuffered: bool,
    dont_write_bytecode: bool,
    safe_path: bool,
    warnings: Vec<OsString>,
    ignored_signals: u64,
    opened: Option<BorrowedFd<'a>>,
    umask: Option<u32>,
}

impl<'a> Job<'a> {
    /// Returns a job with closed standard streams and no arguments.
    #[must_use]
    pub fn new(source: Source) -> Self {
        Self {
            source,
            arguments: Vec::new(),
            environment: None,
            directory: None,
            streams: [None; 3],
            unbuffered: false,
            dont_write_bytecode: false,
            safe_path: false,
            warnings: Vec::new(),
            ignored_signals: 0,
            opened: None,
            umask: None,
        }
    }

    /// Returns a script.
    pub fn script(path: impl Into<OsString>) -> Self {
        Self::new(Source::Script(path.into()))
    }

    /// Returns a program text, as after `-c`.
    pub fn command(text: impl Into<OsString>) -> Self {
        Self::new(Source::Command(text.into()))
    }

    /// Adds arguments.
    #[must_use]
    pub fn arguments<A: Into<OsString>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Gives the program this environment instead of this process' own.
    #[must_use]
    pub fn environment<N: AsRef<OsStr>, V: AsRef<OsStr>>(
        mut self,
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> Self {
        let mut block = Vec::new();
        for (name, value) in variables {
            push_variable(&mut block, name.as_ref().as_bytes(), value.as_ref().as_bytes());
        }
        self.environment = Some(block);
        self
    }

    /// Gives the program these descriptors as its 0, 1 and 2; `None` for a closed one.
    #[must_use]
    pub fn streams(mut self, streams: [Option<BorrowedFd<'a>>; 3]) -> Self {
        self.streams = streams;
        self
    }

    /// Gives the program those of this process' descriptors 0, 1 and 2 that are open.
    #[must_use]
    pub fn standard_streams(mut self) -> Self {
        self.streams = [0, 1, 2].map(open_stream);
        self
    }

    /// Starts the program in this directory.
    #[must_use]
    pub fn directory(mut self, directory: BorrowedFd<'a>) -> Self {
        self.directory = Some(directory);
        self
    }

    /// Options of the interpreter: `-u`, `-B`, `-P` and every `-W`.
    #[must_use]
    pub fn options(
        mut self,
        unbuffered: bool,
        no_bytecode: bool,
        safe_path: bool,
        warnings: Vec<OsString>,
    ) -> Self {
        (self.unbuffered, self.dont_write_bytecode, self.safe_path) = (unbuffered, no_bytecode, safe_path);
        self.warnings = warnings;
        self
    }

    /// Has the program ignore signals: bit N-1 for signal N.
    #[must_use]
    pub fn ignored_signals(mut self, mask: u64) -> Self {
        self.ignored_signals = mask;
        self
    }

    /// Has the script be this file, open for reading at its start: its path is what the program sees of it and is not opened. It
    /// has no meaning for a program that is not a script.
    #[must_use]
    pub fn opened_script(mut self, script: BorrowedFd<'a>) -> Self {
        self.opened = Some(script);
        self
    }

    /// Gives the program this file mode creation mask. Without it the mask is this process', which can only be read by
    /// setting it: so a process with several threads that create files or send jobs gives one.
    #[must_use]
    pub fn umask(mut self, mask: u32) -> Self {
        self.umask = Some(mask & 0o777);
        self
    }

    /// Returns where the program's text is.
    #[must_use]
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// Opens the script, if the source is one.
    ///
    /// # Errors
    /// As for `open(2)`.
    pub fn open_script(&self) -> rustix::io::Result<Option<OwnedFd>> {
        let Source::Script(path) = &self.source else {
            return Ok(None);
        };
        let path = path.as_os_str();
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        match self.directory {
            Some(directory) => rustix::fs::openat(directory, path, flags, Mode::empty()),
            None => rustix::fs::open(path, flags, Mode::empty()),
        }
        .map(Some)
    }

    /// Sends the job as request `id`.
    pub(super) fn send(&self, connection: BorrowedFd<'_>, id: RequestId) -> Result<(), Error> {
        if let (Source::Script(_), Some(script)) = (&self.source, self.opened) {
            return self.send_opened(connection, id, Some(script));
        }
        let script = self.open_script().map_err(io_error("cannot open the script"))?;
        self.send_opened(connection, id, script.as_ref().map(AsFd::as_fd))
    }

    fn send_opened(
        &self,
        connection: BorrowedFd<'_>,
        id: RequestId,
        script: Option<BorrowedFd<'_>>,
    ) -> Result<(), Error> {
        let own_directory = match self.directory {
            Some(_) => None,
            None => Some(open_directory().map_err(io_error("cannot open the working directory"))?),
        };
        let directory = self.directory.or_else(|| own_directory.as_ref().map(AsFd::as_fd));
        let environment =
            self.environment.as_ref().map_or_else(|| Cow::Owned(own_environment()), Cow::Borrowed);
        let path = match self.directory {
            Some(_) => Vec::new(),
            None => {
                rustix::process::getcwd(Vec::new()).map(std::ffi::CString::into_bytes).unwrap_or_default()
            }
        };
        let mut streams = 0;
        for (number, _) in self.streams.iter().enumerate().filter(|(_, stream)| stream.is_some()) {
            streams |= 1 << number;
        }
        let request = Request {
            id,
            program: match &self.source {
                Source::Script(path) => Program::Script { path: path.as_bytes() },
                Source::Command(text) => Program::Command { text: text.as_bytes() },
                Source::Module(name) => Program::Module { name: name.as_bytes() },
                Source::Stdin { dash } => Program::Stdin { dash: *dash },
            },
            arguments: self.arguments.iter().map(|argument| argument.as_bytes()).collect(),
            environment: &environment,
            directory: &path,
            umask: self.umask.unwrap_or_else(own_umask),
            streams,
            ignored_signals: self.ignored_signals,
            options: Options {
                unbuffered: self.unbuffered,
                dont_write_bytecode: self.dont_write_bytecode,
                safe_path: self.safe_path,
                warnings: self.warnings.iter().map(|option| option.as_bytes()).collect(),
            },
        };
        let descriptors: Vec<BorrowedFd<'_>> =
            self.streams.iter().copied().flatten().chain(directory).chain(script).collect();
        Ok(protocol::send(connection, &protocol::encode(&request)?, &descriptors)?)
    }
}

fn open_stream<'a>(number: i32) -> Option<BorrowedFd<'a>> {
    // SAFETY: only asks whether the number is open. Descriptors 0 to 2 belong to nobody and are not closed while a
    // job is being sent.
    let open = unsafe { libc::fcntl(number, libc::F_GETFD) != -1 };
    let was_open = OPEN_AT_START.load(Ordering::Relaxed) & (1 << number) != 0;
    // SAFETY: the call before reported the number as open; descriptors 0 to 2 have no owner in this program
    // and are not closed while a job is being sent.
    (open && was_open).then(|| unsafe { BorrowedFd::borrow_raw(number) })
}

/// Bit N is set if descriptor N was open when the process began. Rust's runtime opens `/dev/null` in the place of
/// closed ones before `main`, so this is found out earlier.
static OPEN_AT_START: AtomicU8 = AtomicU8::new(0b111);

#[used]
#[unsafe(link_section = ".init_array")]
static NOTE_OPEN: extern "C" fn() = {
    extern "C" fn note_open() {
        for number in 0..3 {
            // SAFETY: as in `open_stream`.
            if unsafe { libc::fcntl(number, libc::F_GETFD) } == -1 {
                OPEN_AT_START.fetch_and(!(1 << number), Ordering::Relaxed);
            }
        }
    }
    note_open
};

fn open_directory() -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(".", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

fn push_variable(block: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    block.extend_from_slice(name);
    block.push(b'=');
    block.extend_from_slice(value);
    block.push(0);
}

fn own_environment() -> Vec<u8> {
    let mut block = Vec::with_capacity(4096);
    for (name, value) in std::env::vars_os() {
        push_variable(&mut block, &name.into_vec(), &value.into_vec());
    }
    block
}

/// The mask can only be read by setting it; a client does so while it has one thread.
fn own_umask() -> u32 {
    let mask = rustix::process::umask(Mode::from_raw_mode(0o077));
    rustix::process::umask(mask);
    mask.bits()
}
