//! Pages that arrive after the service runs.
//!
//! Clients wait for each page that is copied before the service runs, and most pages are not needed for the next answer. So the
//! private pages that only one process maps are not in the images. criu restores their mappings empty (`--lazy-pages`) and
//! passes a userfaultfd(2) for each process; this program takes the place of criu's own daemon. A thread that touches such a
//! page waits until one system call has copied it from the dead memory to its place. When the service runs, the other pages are
//! pushed.
//!
//! Until the last one is there the survivor depends on the dead memory, so that a new backup starts only afterwards. A thread of the
//! guest's init serves the pages. Should that fail or end, no thread may ever see a page of zeros in place of its data: the
//! kernel panics with its init, and before that a service whose pages cannot be copied is killed.
//!
//! If the kernel has no such userfaultfd, all pages are in the images.
//!
//! criu sends messages of four bytes each, on a socket in the directory that it works in (`criu/uffd.c`): a PID, with the
//! userfaultfd on the next byte; the negative of the PID of a process that has exited; or that all mappings are made.

mod pending;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::io::{IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use orrery_kimage::Kernel;
use orrery_orthros_images::{PAGE, PageRun};
use orrery_orthros_wire::Report;
use orrery_sys::uffd::missing::{Event, MissingPages, Supplied};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::{kernel_parameters, pidns};
use pending::PendingPages;

/// The name of the socket, in the directory that criu works in.
const SOCKET: &str = "lazy-pages.socket";
/// `LAZY_PAGES_RESTORE_FINISHED` of `criu/uffd.c`.
const FINISHED: i32 = 0x5253_5446;
/// The bytes that are copied with a page that a thread waits for: neighbours are mostly needed next.
const READ_AHEAD: u64 = 16 * PAGE;
/// The bytes that are pushed at a time while no thread waits: a thread that faults meanwhile waits for them.
const PUSHED_AT_ONCE: u64 = 64 * PAGE;
/// The order to push the remaining pages.
const GO: u8 = 1;

/// The dead memory.
pub(crate) trait PageSource: Send + Sync {
    /// Returns where `length` bytes from a physical address on can be read, for as long as the source lives.
    fn place(&self, physical: u64, length: usize) -> Option<*const u8>;
}

impl PageSource for Kernel {
    fn place(&self, physical: u64, length: usize) -> Option<*const u8> {
        self.memory().place(physical, length)
    }
}

/// Returns whether pages can be lazy: the kernel must have userfaultfd, and the host may disable it with `orrery.lazy_pages=off`.
pub(crate) fn are_possible() -> bool {
    kernel_parameters::parameter("orrery.lazy_pages").as_deref() != Some("off")
        && MissingPages::open().is_ok()
}

/// Sends a report to the host.
type Reporter = Box<dyn Fn(&Report) + Send>;

/// The pages that arrive after the service runs, by PID.
#[derive(Debug, Default)]
pub(crate) struct LazyPages {
    spaces: HashMap<i32, PendingPages>,
}

impl LazyPages {
    /// Collects the pages of processes.
    pub(crate) fn new(processes: impl IntoIterator<Item = (i32, Vec<PageRun>)>) -> Self {
        let spaces = processes.into_iter();
        Self { spaces: spaces.map(|(pid, runs)| (pid, PendingPages::new(runs))).collect() }
    }

    /// Returns the number of pages.
    fn pages(&self) -> u64 {
        self.spaces.values().map(PendingPages::pages).sum()
    }

    /// Listens for criu, which will work in `directory`.
    ///
    /// # Errors
    ///
    /// The socket cannot be made.
    pub(crate) fn listen(self, source: Arc<dyn PageSource>, directory: &Path) -> Result<Listener> {
        let path = directory.join(SOCKET);
        let _ = fs::remove_file(&path);
        let listener =
            UnixListener::bind(&path).with_context(|| format!("cannot listen at {}", path.display()))?;
        Ok(Listener { pages: self.pages(), spaces: self.spaces, source, listener })
    }
}

/// The socket that criu connects to.
pub(crate) struct Listener {
    pages: u64,
    spaces: HashMap<i32, PendingPages>,
    source: Arc<dyn PageSource>,
    listener: UnixListener,
}

impl Listener {
    /// Starts to serve page faults, in a thread of its own, which reports when all pages are there, or cannot be. If there can be no
    /// thread the kernel panics: no process may see zeros.
    pub(crate) fn start(self, report: Reporter) -> PageServer {
        let (orders, ours) = match UnixStream::pair() {
            Ok(pair) => pair,
            Err(error) => die(&error.into()),
        };
        let thread = std::thread::Builder::new().name("lazy-pages".to_owned());
        let thread = thread.spawn(move || {
            // Unwinding would close the userfaultfds, and threads that wait would see zeros.
            let _guard = AbortOnPanic;
            let pages = self.pages;
            let server = Server {
                source: self.source,
                report,
                expected: self.spaces,
                listener: Some(self.listener),
                criu: None,
                gone: None,
                orders,
                init: None,
                spaces: Vec::new(),
            };
            server.run(pages);
        });
        match thread {
            Ok(thread) => PageServer { ours, thread },
            Err(error) => die(&error.into()),
        }
    }
}

/// The thread that serves pages. Dropped, it ends: the service must be gone.
pub(crate) struct PageServer {
    ours: UnixStream,
    thread: JoinHandle<()>,
}

impl PageServer {
    /// Pushes the remaining pages to the service, which runs in the PID namespace of `init`, and reports when all are there.
    ///
    /// # Errors
    ///
    /// The thread is gone.
    pub(crate) fn push_remaining(mut self, init: i32) -> Result<()> {
        let mut order = vec![GO];
        order.extend(init.to_le_bytes());
        self.ours.write_all(&order).context("the page server is gone")?;
        // The thread waits for no other order, so that it does not notice that its channel is closed.
        Ok(())
    }

    /// Ends the thread: the service could not be restored, and nothing is left of it.
    pub(crate) fn abandon(self) {
        drop(self.ours);
        let _ = self.thread.join();
    }
}

/// Aborts this guest's init, which panics its kernel.
fn die(error: &anyhow::Error) -> ! {
    eprintln!("orrery-guest: lazy pages: {error:#}");
    std::process::abort();
}

struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// A process with lazy pages.
struct Space {
    uffd: MissingPages,
    pending: PendingPages,
    /// Pages that threads wait for and that could not be copied at once.
    faults: VecDeque<u64>,
    /// Whether its process has not exited.
    lives: bool,
}

struct Server {
    source: Arc<dyn PageSource>,
    report: Reporter,
    /// The pages of processes that criu has not introduced yet.
    expected: HashMap<i32, PendingPages>,
    listener: Option<UnixListener>,
    criu: Option<UnixStream>,
    /// Why criu ended before all mappings were made, if it did.
    gone: Option<anyhow::Error>,
    orders: UnixStream,
    /// The init process of the service's PID namespace, once the service runs.
    init: Option<i32>,
    spaces: Vec<Space>,
}

impl Server {
    fn run(mut self, pages: u64) {
        let mut begin = Instant::now();
        loop {
            let before = self.init.is_some();
            match self.step() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => self.fail(&error),
            }
            if !before && self.init.is_some() {
                begin = Instant::now();
            }
        }
        if self.init.is_some() {
            // All threads that waited have been woken: the userfaultfds can be closed.
            self.spaces.clear();
            (self.report)(&Report::LazyPagesDone { pages, seconds: begin.elapsed().as_secs_f64() });
        }
    }

    /// Kills the service, which must not continue without its memory.
    fn fail(&self, error: &anyhow::Error) -> ! {
        let Some(init) = self.init else {
            // Another backup can still read the dead memory.
            die(error);
        };
        pidns::end(init);
        let error = format!("the service is lost: cannot copy a part of its memory: {error:#}");
        (self.report)(&Report::Failed { error });
        loop {
            std::thread::park();
        }
    }

    /// Waits for an event and handles it. Returns whether there is more to do.
    fn step(&mut self) -> Result<bool> {
        let going = self.init.is_some();
        let busy = self
            .spaces
            .iter()
            .any(|space| space.lives && (!space.faults.is_empty() || going && !space.pending.is_empty()));
        if going && !busy {
            let forgotten = self.expected.values().any(|pending| !pending.is_empty());
            ensure!(!forgotten, "criu has not introduced all processes");
            return Ok(false);
        }
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let (ready, orders) = {
            let input = |descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN);
            let mut all = vec![input(self.orders.as_fd())];
            let criu = self.criu.as_ref().map(UnixStream::as_fd);
            let criu = criu.or(self.listener.as_ref().map(UnixListener::as_fd));
            all.extend(criu.map(input));
            all.extend(self.spaces.iter().map(|space| input(space.uffd.as_fd())));
            match poll(&mut all, busy.then_some(&at_once)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait"),
            }
            let ready = criu.is_some() && !all[1].revents().is_empty();
            (ready, !all[0].revents().is_empty())
        };
        if orders && !going && !self.receive_order()? {
            return Ok(false);
        }
        if ready {
            self.handle_criu();
        }
        let mut index = 0;
        while index < self.spaces.len() {
            // Children of its process are added at the end.
            self.serve(index)?;
            index += 1;
        }
        if self.init.is_some() {
            self.push_some()?;
        }
        Ok(true)
    }

    /// Receives the order to push the remaining pages. Returns whether there is a service.
    fn receive_order(&mut self) -> Result<bool> {
        let mut order = [0];
        if self.orders.read(&mut order)? == 0 {
            return Ok(false);
        }
        let mut init = [0; 4];
        self.orders.read_exact(&mut init)?;
        // criu has sent everything by now; some of it may not be received yet.
        while self.criu.is_some() || self.listener.is_some() {
            self.handle_criu();
        }
        self.init = Some(i32::from_le_bytes(init));
        self.gone.take().map_or(Ok(true), Err)
    }

    /// Handles a message of criu. If criu dies, the restore kills what it had half restored. Until then the userfaultfds stay open, so
    /// that no process sees zeros.
    fn handle_criu(&mut self) {
        if let Err(error) = self.receive_from_criu() {
            (self.criu, self.listener, self.gone) = (None, None, Some(error));
        }
    }

    fn receive_from_criu(&mut self) -> Result<()> {
        let Some(criu) = &mut self.criu else {
            if let Some(listener) = self.listener.take() {
                self.criu = Some(listener.accept().context("criu does not come")?.0);
            }
            return Ok(());
        };
        let mut word = [0; 4];
        criu.read_exact(&mut word).context("criu has gone")?;
        match i32::from_le_bytes(word) {
            FINISHED => self.criu = None,
            ended if ended < 0 => {}
            pid => {
                let uffd = receive(criu)?.into();
                let pending = self.expected.remove(&pid).unwrap_or_default();
                self.spaces.push(Space { uffd, pending, faults: VecDeque::new(), lives: true });
            }
        }
        Ok(())
    }

    /// Handles the events of a process, and copies the pages that it waits for.
    fn serve(&mut self, index: usize) -> Result<()> {
        let mut children = Vec::new();
        let space = &mut self.spaces[index];
        while let Some(event) = space.uffd.event()? {
            match event {
                Event::Fault(page) => space.faults.push_back(page),
                Event::Fork(uffd) => children.push(Space {
                    uffd,
                    pending: space.pending.clone(),
                    faults: VecDeque::new(),
                    lives: true,
                }),
                Event::Remap { from, to, length } => space.pending.relocate(from, to, length),
                Event::Remove { start, end } => {
                    space.pending.take(start, end);
                }
                event => bail!("unknown event {event:?} of a userfaultfd"),
            }
        }
        while let Some(page) = space.faults.pop_front() {
            let copied = match space.pending.take_at(page, READ_AHEAD) {
                Some(run) => space.copy(&*self.source, run)?,
                None => space.zero(page)?,
            };
            if !copied {
                space.faults.push_front(page);
                break;
            }
        }
        self.spaces.extend(children);
        Ok(())
    }

    /// Pushes some pages that nobody waits for.
    fn push_some(&mut self) -> Result<()> {
        let next = self.spaces.iter_mut().find(|space| space.lives && !space.pending.is_empty());
        let Some(space) = next else { return Ok(()) };
        if let Some(run) = space.pending.take_next(PUSHED_AT_ONCE) {
            space.copy(&*self.source, run)?;
        }
        Ok(())
    }
}

impl Space {
    /// Copies pages. Returns false if the process's events must be handled first; the pages are pending again then.
    fn copy(&mut self, source: &dyn PageSource, mut run: PageRun) -> Result<bool> {
        while run.length > 0 {
            let length = usize::try_from(run.length)?;
            let from = source.place(run.physical, length);
            let from = from.with_context(|| format!("there is no memory at {:#x}", run.physical))?;
            // SAFETY: `from` points to `length` readable bytes of the source, which lives as long as the server.
            let copied = unsafe { self.uffd.copy(from, run.address, run.length) }?;
            let done = match copied {
                Supplied::Bytes(done) => done,
                Supplied::Present => {
                    self.uffd.wake(run.address);
                    PAGE
                }
                Supplied::Changing => {
                    self.pending.put_back(run);
                    return Ok(false);
                }
                Supplied::Exited => {
                    self.end();
                    return Ok(true);
                }
            };
            ensure!(
                done > 0 && done <= run.length && done.is_multiple_of(PAGE),
                "the kernel copied {done} bytes"
            );
            run = PageRun {
                address: run.address + done,
                physical: run.physical + done,
                length: run.length - done,
            };
        }
        Ok(true)
    }

    /// Fills a page with zeros: it was never touched, or was discarded.
    fn zero(&mut self, page: u64) -> Result<bool> {
        match self.uffd.zero(page)? {
            Supplied::Bytes(_) => {}
            Supplied::Present => self.uffd.wake(page),
            Supplied::Changing => return Ok(false),
            Supplied::Exited => self.end(),
        }
        Ok(true)
    }

    fn end(&mut self) {
        self.pending = PendingPages::default();
        self.faults.clear();
        self.lives = false;
    }
}

/// Receives the file descriptor that comes with the next byte.
fn receive(from: &UnixStream) -> Result<OwnedFd> {
    let mut byte = [0];
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    recvmsg(from, &mut [IoSliceMut::new(&mut byte)], &mut control, flags).context("criu has gone")?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message
            && let Some(descriptor) = descriptors.next()
        {
            return Ok(descriptor);
        }
    }
    bail!("criu has introduced a process without its userfaultfd")
}
