//! The model of a service: everything that its images say, as plain data.

mod file;
mod memory;
mod process;
mod restore_state;
mod settings;

use orrery_orthros_wire::Summary;

pub(crate) use file::{
    EpollTarget, File, FileId, Ghost, Inet, Inotify, InotifyWatch, Memfd, SocketPath, Terminal, Timer, Unix,
    UnixMessage, UnixPending,
};
pub(crate) use memory::{
    AddressSpace, Backing, Mapping, MemoryLayout, PageRange, PageSource, SharedMemory, SharedPage,
};
pub use memory::{PAGE, PageRun};
pub(crate) use process::{
    Descriptor, Directories, FILE_SIZE, FileLock, LockKind, Process, ProcessState, Rseq, Running,
    SeccompFilter, SignalAction, Thread, TimerLeft, Timers,
};
pub use restore_state::{
    Connection, Datagram, ExitedLeaders, FileSizeLimit, IpcObject, MessageQueue, PendingConnection,
    RestoreState, SemaphoreSet, UnnamedFile,
};
pub use settings::{
    Epoll, EpollEntry, FileOwner, Holder, PacketPipe, SocketOption, SocketRestrictions, SocketSettings,
    ThreadAttributes, ThreadCall,
};

/// A service as its dead kernel left it: its processes, and everything that these refer to.
#[derive(Debug)]
pub struct Service {
    /// The dead kernel's monotonic clock, in nanoseconds.
    pub(crate) monotonic: u64,
    /// The processes, a parent before its children. The first one is the service's own.
    pub(crate) processes: Vec<Process>,
    /// The open files. The file with ID `n` is the one at index `n - 1`.
    pub(crate) files: Vec<File>,
    /// Open files without a name.
    pub(crate) ghosts: Vec<Ghost>,
    /// Memory that processes share, without a file.
    pub(crate) shared_memory: Vec<SharedMemory>,
    /// The seccomp filters of all threads. A thread, and a filter, refers to one by its index.
    pub(crate) filters: Vec<SeccompFilter>,
    /// What CRIU does not restore.
    pub(crate) restore_state: RestoreState,
    /// Everything that is not carried over exactly, as sentences.
    pub(crate) remarks: Vec<String>,
    /// Those of the remarks that tell of something hung up or killed.
    pub(crate) losses: Vec<String>,
}

impl Service {
    /// Returns the remarks that tell of something hung up or killed. A service that can continue where it is should not be
    /// restored with one of these.
    #[must_use]
    pub fn losses(&self) -> &[String] {
        &self.losses
    }

    /// Returns the pages of each process that are to arrive after the service runs, by PID.
    pub fn lazy_pages(&self) -> impl Iterator<Item = (i32, Vec<PageRun>)> {
        self.running().map(|(process, running)| {
            let lazy = running.memory.pages.iter().filter(|range| range.lazy).filter_map(PageRange::run);
            (process.pid.cast_signed(), lazy.collect())
        })
    }

    /// Returns what the images have, counted.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let running = || self.running().map(|(_, running)| running);
        let pages = |lazy: bool| {
            let ranges = running().flat_map(|running| &running.memory.pages);
            ranges.filter(|range| range.lazy || !lazy).map(|range| range.length / PAGE).sum::<u64>()
        };
        let shared: usize = self.shared_memory.iter().map(|memory| memory.pages.len()).sum();
        let is_connection = |file: &&File| matches!(file, File::Inet(Inet { connection: Some(_), .. }));
        Summary {
            processes: running().count(),
            threads: running().map(|running| running.threads.len()).sum(),
            pages: pages(false) + shared as u64,
            lazy_pages: pages(true),
            descriptors: running().map(|running| running.descriptors.len()).sum(),
            connections: self.files.iter().filter(is_connection).count(),
            remarks: self.remarks.clone(),
            ..Summary::default()
        }
    }

    fn running(&self) -> impl Iterator<Item = (&Process, &Running)> {
        self.processes.iter().filter_map(|process| match &process.state {
            ProcessState::Running(running) => Some((process, &**running)),
            ProcessState::Exited { .. } => None,
        })
    }
}
