//! Memory that comes after the service lives again.
//!
//! A page that is copied before the service runs is waited for by its clients, and most pages are not needed for the next
//! answer. So the pages that only one process maps, and that are private to it, are not written into the images at all.
//! criu restores their mappings empty (`--lazy-pages`) and hands over a userfaultfd(2) for each process; this program takes the
//! place of criu's own daemon. A thread that touches such a page waits until it has been copied from the dead
//! memory, by one system call, straight to its place. When the service runs, the others follow by themselves.
//!
//! Until the last one is there the survivor depends on the dead memory, as it does on having no backup yet: both end before a
//! new backup starts. The pages are brought by a thread of the guest's first process. Should that fail or end, nobody may
//! ever see a page of zeros in place of what it had: the kernel dies with its first process, and before that a service whose
//! memory cannot come is killed.
//!
//! Where the kernel gives no such descriptor, all memory is written into the images.
//!
//! What criu says is four bytes each, on a socket in the folder that it works in (`criu/uffd.c`): a process' number, with its
//! descriptor on the next byte; the negative of the number of one that has ended; or that all mappings are made.

mod missing;
mod outstanding;
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
use orrery_orthros_wire::Report;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::criu::PAGE;
use crate::{nest, setup};
use missing::{Brought, Event, Missing};
pub(crate) use outstanding::{Outstanding, Run};

/// What criu calls its end of the socket, in the folder that it works in.
const SOCKET: &str = "lazy-pages.socket";
/// `LAZY_PAGES_RESTORE_FINISHED` of `criu/uffd.c`.
const FINISHED: i32 = 0x5253_5446;
/// How much follows a page that is waited for: what lies beside it is mostly wanted next.
const ALONG: u64 = 16 * PAGE;
/// How much is brought at a time while nobody waits. It is as long as somebody who begins to wait may have to.
const AT_A_TIME: u64 = 64 * PAGE;
/// What tells the thread that the service runs.
const GO: u8 = 1;

/// Where the dead memory lies.
pub(crate) trait Source: Send + Sync {
    /// Where so many bytes from a physical address on can be read; they stay there as long as this does.
    fn place(&self, physical: u64, length: usize) -> Option<*const u8>;
}

impl Source for Kernel {
    fn place(&self, physical: u64, length: usize) -> Option<*const u8> {
        self.memory().place(physical, length)
    }
}

/// Whether memory may come later here: the kernel must be able to, and the host may have said `orrery.later=off`.
pub(crate) fn is_possible() -> bool {
    setup::parameter("orrery.later").as_deref() != Some("off") && Missing::open().is_some()
}

/// Who is told what has become of the memory.
type Tell = Box<dyn Fn(&Report) + Send>;

/// The pages that come later, by the numbers of processes in the service.
#[derive(Debug, Default)]
pub(crate) struct Later {
    spaces: HashMap<i32, Outstanding>,
}

impl Later {
    /// Adds what a process waits for.
    pub(crate) fn add(&mut self, pid: i32, pages: Outstanding) {
        self.spaces.insert(pid, pages);
    }

    /// Takes back what was added for a process.
    pub(crate) fn remove(&mut self, pid: i32) {
        self.spaces.remove(&pid);
    }

    pub(crate) fn pages(&self) -> u64 {
        self.spaces.values().map(Outstanding::pages).sum()
    }

    /// Listens for criu, which will work in `folder`.
    ///
    /// # Errors
    ///
    /// Where there can be no socket.
    pub(crate) fn listen(self, source: Arc<dyn Source>, folder: &Path) -> Result<Listening> {
        let path = folder.join(SOCKET);
        let _ = fs::remove_file(&path);
        let listener =
            UnixListener::bind(&path).with_context(|| format!("cannot listen at {}", path.display()))?;
        Ok(Listening { pages: self.pages(), spaces: self.spaces, source, listener })
    }
}

/// Ready for criu to come.
pub(crate) struct Listening {
    pages: u64,
    spaces: HashMap<i32, Outstanding>,
    source: Arc<dyn Source>,
    listener: UnixListener,
}

impl Listening {
    /// Begins to bring what is waited for, in a thread of its own, which tells `tell` when all is there, or cannot be. Where there
    /// can be no thread the kernel dies: whoever waits must not find zeros.
    pub(crate) fn begin(self, tell: Tell) -> Bringing {
        let (orders, ours) = match UnixStream::pair() {
            Ok(pair) => pair,
            Err(error) => die(&error.into()),
        };
        let thread = std::thread::Builder::new().name("later".to_owned());
        let thread = thread.spawn(move || {
            // Unwinding would close the descriptors, and whoever waits would find zeros.
            let _guard = DieTogether;
            let pages = self.pages;
            let server = Server {
                source: self.source,
                tell,
                awaited: self.spaces,
                listener: Some(self.listener),
                criu: None,
                gone: None,
                orders,
                nest: None,
                spaces: Vec::new(),
            };
            server.run(pages);
        });
        match thread {
            Ok(thread) => Bringing { ours, thread },
            Err(error) => die(&error.into()),
        }
    }
}

/// Pages are being brought. Dropped, that ends: the service must be gone.
pub(crate) struct Bringing {
    ours: UnixStream,
    thread: JoinHandle<()>,
}

impl Bringing {
    /// The service runs, in a nest: what it has not asked for follows, and at the end the host is told.
    ///
    /// # Errors
    ///
    /// Where the thread has gone.
    pub(crate) fn go_on(mut self, nest: i32) -> Result<()> {
        let mut order = vec![GO];
        order.extend(nest.to_le_bytes());
        self.ours.write_all(&order).context("nobody brings the service's memory")?;
        // The thread waits for no other order: what is dropped here is not missed.
        Ok(())
    }

    /// The service could not be made, and nothing is left of it.
    pub(crate) fn give_up(self) {
        drop(self.ours);
        let _ = self.thread.join();
    }
}

/// Ends this guest's first process, and its kernel with it.
fn die(error: &anyhow::Error) -> ! {
    eprintln!("orrery-guest: memory that was to come later: {error:#}");
    std::process::abort();
}

struct DieTogether;

impl Drop for DieTogether {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// A process that waits for pages.
struct Space {
    missing: Missing,
    outstanding: Outstanding,
    /// Pages that are waited for and could not be brought at once.
    wanted: VecDeque<u64>,
    /// Whether its process is there.
    lives: bool,
}

struct Server {
    source: Arc<dyn Source>,
    tell: Tell,
    /// Of processes that criu has not told of yet.
    awaited: HashMap<i32, Outstanding>,
    listener: Option<UnixListener>,
    criu: Option<UnixStream>,
    /// How criu ended before all mappings were made, if it did.
    gone: Option<anyhow::Error>,
    orders: UnixStream,
    /// Where the service runs, once it does.
    nest: Option<i32>,
    spaces: Vec<Space>,
}

impl Server {
    fn run(mut self, pages: u64) {
        let mut begin = Instant::now();
        loop {
            let before = self.nest.is_some();
            match self.step() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => self.fail(&error),
            }
            if !before && self.nest.is_some() {
                begin = Instant::now();
            }
        }
        if self.nest.is_some() {
            // Whoever waited has been woken; what is closed now is waited on by nobody.
            self.spaces.clear();
            (self.tell)(&Report::LazyPagesDone { pages, seconds: begin.elapsed().as_secs_f64() });
        }
    }

    /// Nobody may go on without its memory.
    fn fail(&self, error: &anyhow::Error) -> ! {
        let Some(nest) = self.nest else {
            // The dead memory is still there for another backup.
            die(error);
        };
        nest::end(nest);
        let error = format!("the service is lost, as a part of its memory could not be brought: {error:#}");
        (self.tell)(&Report::Failed { error });
        loop {
            std::thread::park();
        }
    }

    /// Waits for something to do and does it; whether there is more.
    fn step(&mut self) -> Result<bool> {
        let going = self.nest.is_some();
        let busy = self
            .spaces
            .iter()
            .any(|space| space.lives && (!space.wanted.is_empty() || going && !space.outstanding.is_empty()));
        if going && !busy {
            let forgotten = self.awaited.values().any(|outstanding| !outstanding.is_empty());
            ensure!(!forgotten, "criu has not told of all processes");
            return Ok(false);
        }
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let (ready, orders) = {
            let input = |descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN);
            let mut all = vec![input(self.orders.as_fd())];
            let criu = self.criu.as_ref().map(UnixStream::as_fd);
            let criu = criu.or(self.listener.as_ref().map(UnixListener::as_fd));
            all.extend(criu.map(input));
            all.extend(self.spaces.iter().map(|space| input(space.missing.as_fd())));
            match poll(&mut all, busy.then_some(&at_once)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait"),
            }
            let ready = criu.is_some() && !all[1].revents().is_empty();
            (ready, !all[0].revents().is_empty())
        };
        if orders && !going && !self.listen_to_orders()? {
            return Ok(false);
        }
        if ready {
            self.hear_criu();
        }
        let mut index = 0;
        while index < self.spaces.len() {
            // Children of its process are added at the end.
            self.serve(index)?;
            index += 1;
        }
        if self.nest.is_some() {
            self.bring_some()?;
        }
        Ok(true)
    }

    /// Whether the service runs now, or there is none.
    fn listen_to_orders(&mut self) -> Result<bool> {
        let mut order = [0];
        if self.orders.read(&mut order)? == 0 {
            return Ok(false);
        }
        let mut nest = [0; 4];
        self.orders.read_exact(&mut nest)?;
        // criu has said all before, perhaps without anyone having listened yet.
        while self.criu.is_some() || self.listener.is_some() {
            self.hear_criu();
        }
        self.nest = Some(i32::from_le_bytes(nest));
        self.gone.take().map_or(Ok(true), Err)
    }

    /// Listens to criu. If it dies, whoever started it will see that, and end what it had half made. Until then the
    /// descriptors stay open, so that nobody there finds zeros.
    fn hear_criu(&mut self) {
        if let Err(error) = self.listen_to_criu() {
            (self.criu, self.listener, self.gone) = (None, None, Some(error));
        }
    }

    fn listen_to_criu(&mut self) -> Result<()> {
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
                let missing = receive(criu)?.into();
                let outstanding = self.awaited.remove(&pid).unwrap_or_default();
                self.spaces.push(Space { missing, outstanding, wanted: VecDeque::new(), lives: true });
            }
        }
        Ok(())
    }

    /// Reads what a process has done, and brings what it waits for.
    fn serve(&mut self, index: usize) -> Result<()> {
        let mut children = Vec::new();
        let space = &mut self.spaces[index];
        while let Some(event) = space.missing.event()? {
            match event {
                Event::Wants(page) => space.wanted.push_back(page),
                Event::Forked(missing) => children.push(Space {
                    missing,
                    outstanding: space.outstanding.clone(),
                    wanted: VecDeque::new(),
                    lives: true,
                }),
                Event::Moved { from, to, length } => space.outstanding.relocate(from, to, length),
                Event::Dropped { start, end } => {
                    space.outstanding.take(start, end);
                }
            }
        }
        while let Some(page) = space.wanted.pop_front() {
            let brought = match space.outstanding.take_at(page, ALONG) {
                Some(run) => space.bring(&*self.source, run)?,
                None => space.nothing(page)?,
            };
            if !brought {
                space.wanted.push_front(page);
                break;
            }
        }
        self.spaces.extend(children);
        Ok(())
    }

    /// Brings some that nobody waits for.
    fn bring_some(&mut self) -> Result<()> {
        let next = self.spaces.iter_mut().find(|space| space.lives && !space.outstanding.is_empty());
        let Some(space) = next else { return Ok(()) };
        if let Some(run) = space.outstanding.take_next(AT_A_TIME) {
            space.bring(&*self.source, run)?;
        }
        Ok(())
    }
}

impl Space {
    /// Brings pages; what cannot come before the process' events have been read is put back, and then this is not true.
    fn bring(&mut self, source: &dyn Source, mut run: Run) -> Result<bool> {
        while run.length > 0 {
            let length = usize::try_from(run.length)?;
            let from = source.place(run.physical, length);
            let from = from.with_context(|| format!("{:#x} is no memory", run.physical))?;
            // SAFETY: the source has so many bytes at that place for as long as it lives.
            let brought = unsafe { self.missing.copy(from, run.address, run.length) }?;
            let done = match brought {
                Brought::Bytes(done) => done,
                Brought::There => {
                    self.missing.wake(run.address);
                    PAGE
                }
                Brought::Changing => {
                    self.outstanding.give_back(run);
                    return Ok(false);
                }
                Brought::Ended => {
                    self.end();
                    return Ok(true);
                }
            };
            ensure!(done > 0 && done <= run.length && done.is_multiple_of(PAGE), "{done} bytes were brought");
            run =
                Run { address: run.address + done, physical: run.physical + done, length: run.length - done };
        }
        Ok(true)
    }

    /// Brings a page that has never been touched, or was given back.
    fn nothing(&mut self, page: u64) -> Result<bool> {
        match self.missing.zero(page)? {
            Brought::Bytes(_) => {}
            Brought::There => self.missing.wake(page),
            Brought::Changing => return Ok(false),
            Brought::Ended => self.end(),
        }
        Ok(true)
    }

    fn end(&mut self) {
        self.outstanding = Outstanding::default();
        self.wanted.clear();
        self.lives = false;
    }
}

/// Takes the descriptor that comes with the next byte.
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
    bail!("criu has told of a process without its descriptor")
}
