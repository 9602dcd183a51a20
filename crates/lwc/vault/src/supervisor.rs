//! The vault's side: the keeper, its spare, and the twins.
//!
//! The keeper has loaded the secrets. It serves nobody itself, but copies itself (fork(2)) for each client: a twin has
//! all that was loaded until then, serves this client alone, and ends with it. So clients never wait for one another,
//! and one that breaks its twin breaks nobody else's.
//!
//! The spare is a copy of the keeper, too, renewed whenever something was loaded. It sleeps until the keeper dies, and
//! then is the keeper, with a spare of its own. All have the socket open on which requests arrive, so none is lost but
//! the one that the keeper died of.
//!
//! When the last process of the program is gone, or has closed its end of the socket, keeper and spare end; a twin ends
//! with its client, or when that closes the socket between the two.

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;
use std::time::Instant;

use orrery_domain::gate::{Face, Partner};
use orrery_domain::watch::{Ear, Watcher, last_errno};
use orrery_sys::signals;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::CpuSet;

use super::call_buffer::{ANYWHERE, CallBuffer, ROOM};
use super::message::{self, LOAD_ROOM, Request};
use super::{VaultService, closed};

/// How many twins one client may have: more than it has any use for.
const TWINS_OF_ONE: usize = 64;
/// How many twins there may be.
const TWINS: usize = 4096;
/// A spare that lives shorter than this is not replaced at once.
const SHORT_LIFE: Duration = Duration::from_secs(1);

/// Keeps secrets until nobody is left who could ask. `socket` is where requests arrive.
///
/// The process must have one thread, which never returns.
pub(super) fn keep<K: VaultService>(socket: OwnedFd, keeper: &mut K) -> ! {
    let outcome = prepare(&socket);
    // Whoever made this process waits for it to be closed.
    message::answer(Some(&socket), outcome.as_ref().map(|_| &[][..]).map_err(|errno| *errno), &[]);
    if let Ok(own) = outcome {
        let user = rustix::process::geteuid().as_raw();
        let state = State { socket, own, user, pinned: None, spare: None, twins: Vec::new() };
        let _ = state.serve(keeper);
    }
    exit(0)
}

/// Closes all doors, before anything is loaded.
fn prepare(socket: &OwnedFd) -> Result<OwnedFd, Errno> {
    closed::close()?;
    closed::lock_memory();
    signals::block_all();
    // Twins and spares are known by their pidfds; nobody waits for them.
    // SAFETY: no handler is set.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    // Neither a terminal's signals nor its hang-up are meant for us.
    let _ = rustix::process::setsid();
    message::name_senders(socket)?;
    myself()
}

fn myself() -> Result<OwnedFd, Errno> {
    pidfd_open(rustix::process::getpid(), PidfdFlags::empty())
}

fn exit(status: i32) -> ! {
    // SAFETY: ends the process without running anything of the program's.
    unsafe { libc::_exit(status) }
}

/// Who a process is after it copied itself.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The keeper that it was.
    VaultService,
    /// The copy, when its time has come.
    Successor,
    /// The copy, when there is nobody left to serve.
    Superfluous,
}

struct Twin {
    client: Option<Pid>,
    pidfd: OwnedFd,
}

struct Spare {
    pidfd: OwnedFd,
    pid: Pid,
    made: Instant,
}

struct State {
    socket: OwnedFd,
    /// The keeper, as its spare knows it.
    own: OwnedFd,
    /// Whose process this is: who may have something loaded.
    user: u32,
    /// The first other user who came. Servers change their user once; no third one has a business here.
    pinned: Option<u32>,
    spare: Option<Spare>,
    twins: Vec<Twin>,
}

impl State {
    fn serve<K: VaultService>(mut self, keeper: &mut K) -> Result<(), Errno> {
        loop {
            if self.spare.is_none() && self.make_spare() == Role::Superfluous {
                return Ok(());
            }
            let due = keeper.tidy();
            if due.is_some_and(|due| due.is_zero()) {
                self.end_spare();
                continue;
            }
            let due = due.and_then(|due| rustix::time::Timespec::try_from(due).ok());
            let mut all = vec![PollFd::new(&self.socket, PollFlags::IN)];
            all.extend(self.spare.iter().map(|spare| PollFd::new(&spare.pidfd, PollFlags::IN)));
            let spares = all.len() - 1;
            all.extend(self.twins.iter().map(|twin| PollFd::new(&twin.pidfd, PollFlags::IN)));
            rustix::io::retry_on_intr(|| rustix::event::poll(&mut all, due.as_ref()))?;
            let asked = !all[0].revents().is_empty();
            let spare_died = spares == 1 && !all[1].revents().is_empty();
            let died: Vec<bool> = all[1 + spares..].iter().map(|one| !one.revents().is_empty()).collect();
            drop(all);
            let mut died = died.into_iter();
            self.twins.retain(|_| died.next() != Some(true));
            if spare_died
                && let Some(spare) = self.spare.take()
                && spare.made.elapsed() < SHORT_LIFE
            {
                // Somebody kills them as fast as they are made.
                std::thread::sleep(Duration::from_millis(50));
            }
            if asked {
                match message::receive_request(self.socket.as_fd()) {
                    Ok(None) => return Ok(()),
                    Ok(Some(arrival)) => self.heed(keeper, &arrival),
                    // Taken by a keeper that we replace, or out of descriptors: then the request is gone, and who sent
                    // it finds its socket closed.
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        }
    }

    fn heed<K: VaultService>(&mut self, keeper: &mut K, arrival: &message::Arrival) {
        let answer_to = arrival.answer_to.as_ref();
        let request = arrival.bytes.as_deref().ok_or(Errno::MSGSIZE);
        let request = request.and_then(|bytes| Request::decode(bytes).ok_or(Errno::BADMSG));
        let done = match (request, arrival.from) {
            (Ok(Request::Load(bytes)), Some((_, user))) if user == self.user || user == 0 => {
                let mut answer = vec![0; LOAD_ROOM];
                let length = keeper.load(bytes, &mut answer);
                // The next keeper shall know it, too, and shall be there before anybody relies on it.
                self.end_spare();
                match self.make_spare() {
                    Role::VaultService => {}
                    Role::Successor => return,
                    Role::Superfluous => exit(0),
                }
                length.map(|length| {
                    message::answer(answer_to, Ok(&answer[..length.min(LOAD_ROOM)]), &[]);
                })
            }
            (Ok(Request::Twin), Some((client, user))) if self.may_ask(user) => {
                self.make_twin(keeper, client, answer_to)
            }
            (Ok(_), _) => Err(Errno::PERM),
            (Err(errno), _) => Err(errno),
        };
        if let Err(errno) = done {
            message::answer(answer_to, Err(errno), &[]);
        }
    }

    fn may_ask(&mut self, user: u32) -> bool {
        user == self.user || user == 0 || *self.pinned.get_or_insert(user) == user
    }

    fn make_spare(&mut self) -> Role {
        // SAFETY: the process has one thread.
        match unsafe { libc::fork() } {
            0 => {
                self.spare = None;
                closed::lock_memory();
                wait_for_my_turn(self)
            }
            number => {
                self.spare = Pid::from_raw(number.max(0)).and_then(|pid| {
                    let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
                    Some(Spare { pidfd, pid, made: Instant::now() })
                });
                if self.spare.is_none() {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Role::VaultService
            }
        }
    }

    fn end_spare(&mut self) {
        if let Some(spare) = self.spare.take() {
            let _ = rustix::process::pidfd_send_signal(&spare.pidfd, rustix::process::Signal::KILL);
            // Dead before there is another one: two would both be keepers.
            let mut one = [PollFd::new(&spare.pidfd, PollFlags::IN)];
            let _ = rustix::io::retry_on_intr(|| rustix::event::poll(&mut one, None));
            let _ = spare.pid;
        }
    }

    fn make_twin<K: VaultService>(
        &mut self,
        keeper: &mut K,
        client: Option<Pid>,
        answer_to: Option<&OwnedFd>,
    ) -> Result<(), Errno> {
        let answer_to = answer_to.ok_or(Errno::BADMSG)?;
        let of_client = self.twins.iter().filter(|twin| twin.client == client).count();
        if of_client >= TWINS_OF_ONE || self.twins.len() >= TWINS {
            return Err(Errno::USERS);
        }
        // SAFETY: the process has one thread.
        match unsafe { libc::fork() } {
            0 => {
                let Err(errno) = self.live_as_twin(keeper, client, answer_to);
                message::answer(Some(answer_to), Err(errno), &[]);
                exit(0)
            }
            number => {
                let pid = Pid::from_raw(number.max(0)).ok_or_else(last_errno)?;
                // One that is dead by now has said why, or its client sees the end of file.
                if let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) {
                    self.twins.push(Twin { client, pidfd });
                }
                Ok(())
            }
        }
    }

    fn live_as_twin<K: VaultService>(
        &mut self,
        keeper: &mut K,
        client: Option<Pid>,
        answer_to: &OwnedFd,
    ) -> Result<std::convert::Infallible, Errno> {
        // Whatever else the keeper has open is none of the twin's business; least of all the socket, whose end of file
        // would never come.
        let socket = rustix::io::fcntl_dupfd_cloexec(answer_to, 3)?;
        let socket = only(socket)?;
        closed::lock_memory();
        closed::drop_capabilities();
        let client = client.map(|pid| pidfd_open(pid, PidfdFlags::empty())).transpose();
        // It may be gone already, or its number somebody else's: the socket tells of its death just as well.
        let client = client.ok().flatten();
        let (line, memory) = CallBuffer::make()?;
        let heard = line.twin().heard();
        let mut watcher = Watcher::prepare(client.as_ref().unwrap_or(&socket).as_raw_fd(), line.mark())
            .map_err(|_| Errno::NOMEM)?;
        let ear = Ear { fd: socket.as_raw_fd(), heed: leave, with: std::ptr::null() };
        // SAFETY: `leave` makes one system call and does not return.
        unsafe { watcher.listen(ear) };
        watcher.start()?;
        let own = myself()?;
        message::answer(Some(&socket), Ok(&[]), &[memory.as_fd(), own.as_fd()]);
        drop((memory, own));
        closed::give_up();
        Server { line, keeper, heard }.serve()
    }
}

/// In the spare: sleeps until the keeper has died, or there is nobody left to serve.
fn wait_for_my_turn(state: &mut State) -> Role {
    loop {
        let mut both =
            [PollFd::new(&state.own, PollFlags::IN), PollFd::new(&state.socket, PollFlags::empty())];
        if rustix::io::retry_on_intr(|| rustix::event::poll(&mut both, None)).is_err() {
            return Role::Superfluous;
        }
        let (dead, over) = (!both[0].revents().is_empty(), !both[1].revents().is_empty());
        if over {
            return Role::Superfluous;
        }
        if dead {
            let Ok(own) = myself() else { return Role::Superfluous };
            state.own = own;
            return Role::Successor;
        }
    }
}

/// Closes all descriptors but the standard ones and `fd`, which moves.
fn only(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    // Descriptors that handles elsewhere in memory still name are closed here, too; none of those is used or dropped
    // again.
    if fd.as_raw_fd() != 3 {
        // SAFETY: number 3 is replaced, which nothing uses any more; `OwnedFd` then owns it alone.
        let moved = unsafe { libc::dup3(fd.as_raw_fd(), 3, libc::O_CLOEXEC) };
        if moved < 0 {
            return Err(last_errno());
        }
    }
    std::mem::forget(fd);
    // SAFETY: see above. close_range(2) cannot fail where it exists (Linux 5.9).
    if unsafe { libc::syscall(libc::SYS_close_range, 4, u32::MAX, 0) } < 0 {
        for number in 4..1024 {
            // SAFETY: as above.
            unsafe { libc::close(number) };
        }
    }
    // SAFETY: just made, owned by nobody else.
    Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(3) })
}

/// On the twin's watcher: the client has closed its end.
unsafe extern "C" fn leave(_: *const c_void) {
    // SAFETY: ends the process; touches no thread-local storage.
    let _ = unsafe { syscalls::syscall!(syscalls::Sysno::exit_group, 0) };
}

/// A twin at work.
struct Server<'a, K> {
    line: CallBuffer,
    keeper: &'a mut K,
    heard: u32,
}

impl<K: VaultService> Server<'_, K> {
    fn serve(mut self) -> ! {
        let (mut request, mut answer) = (vec![0; ROOM], vec![0; ROOM]);
        let (mut last, mut at) = (0, ANYWHERE);
        loop {
            while let Some((number, length)) = self.line.asked(last, &mut request) {
                last = number;
                let served = length.and_then(|length| self.keeper.serve(&request[..length], &mut answer));
                match served {
                    Ok(length) => {
                        let length = length.min(ROOM);
                        self.line.answer(number, Ok(&answer[..length]));
                        answer[..length].fill(0);
                    }
                    Err(errno) => self.line.answer(number, Err(errno)),
                }
                self.line.twin().ring();
                follow(&mut at, self.line.cpu());
            }
            let heard = self.heard;
            // Clients do other things between two calls, and are not to be interrupted in them.
            self.line.twin().wait_asleep(heard, None, Partner::Watched);
            self.heard = self.line.twin().heard();
        }
    }
}

/// Goes where the client runs: on its CPU the hand-over is cheapest, since nobody has to be woken up elsewhere.
fn follow(at: &mut u32, wanted: u32) {
    if *at == wanted {
        return;
    }
    *at = wanted;
    let mut cpus = CpuSet::new();
    if wanted == ANYWHERE {
        (0..CpuSet::MAX_CPU).for_each(|cpu| cpus.set(cpu));
    } else {
        let wanted = wanted as usize;
        if wanted >= CpuSet::MAX_CPU {
            return;
        }
        cpus.set(wanted);
    }
    // A CPU that it may not use is refused, and it stays where it is.
    let _ = rustix::thread::sched_setaffinity(None, &cpus);
}

const _: () = assert!(size_of::<Face>() == 64, "a face has a line of the cache for itself");
