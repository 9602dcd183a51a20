//! The program's side: registers a function with the executive and a manager.

use std::ffi::{c_int, c_void};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicUsize};
use std::sync::{Mutex, TryLockError};
use std::time::Duration;

use orrery_hijack_image::upcall::{
    IS_REGISTERED, OPTION, PROBE, Queue, REGISTER, Registration, UNREGISTER, VERSION,
};
use orrery_sys::{scm, signals};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::getpid;
use rustix::thread::gettid;

use crate::error::UpcallError;
use crate::shared::PAGE;
use crate::socket::default_socket;
use crate::stack::Stack;
use crate::wire;

/// A function that is called with the number and the value that an extension emits, and the pointer with which it was registered.
pub type Function = unsafe extern "C" fn(number: i64, value: i64, user: *mut c_void);

/// How a function is registered.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The manager's socket; `None` for [`default_socket`].
    pub manager: Option<PathBuf>,
    /// The length of the function's stack in bytes, 32 KiB to 1 GiB (a call takes a signal frame of it, up to 12 KiB); 0 for 64 KiB.
    pub stack_size: usize,
}

#[expect(clippy::cast_possible_truncation, reason = "the kernel has an int, and the number fits")]
const NUMBER: c_int = OPTION as c_int;
const DEFAULT_STACK: usize = 64 << 10;
const STACKS: std::ops::RangeInclusive<usize> = 32 << 10..=1 << 30;
/// How long a manager may take to reply.
const PATIENCE: Duration = Duration::from_secs(10);

/// A registered function.
struct Registered {
    process: i32,
    thread: i32,
    stack: Stack,
}

static REGISTERED: Mutex<Option<Registered>> = Mutex::new(None);
/// Two pages: what is shared with the manager, the queue first. They stay for the life of the process, since the executive may look at
/// them at any time.
static PAGES: AtomicUsize = AtomicUsize::new(0);
/// The process that has them.
static PAGES_OF: AtomicUsize = AtomicUsize::new(0);
static FUNCTION: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
static USER: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Registers a function. It is called in the calling thread, on a stack of its own, whatever that thread is doing then.
///
/// # Errors
/// [`UpcallError`]; nothing is registered then.
///
/// # Safety
/// The function may be called with `user` at any time until [`unregister`] returns, also where the thread holds a lock or is within its
/// allocator: it calls async-signal-safe functions alone (signal-safety(7)). It returns, or leaves by `siglongjmp` for good; it does not
/// unwind.
pub unsafe fn register(options: &Options, function: Function, user: *mut c_void) -> Result<(), UpcallError> {
    let size = if options.stack_size == 0 { DEFAULT_STACK } else { options.stack_size };
    if !STACKS.contains(&size) {
        return Err(UpcallError::Stack(size));
    }
    let is_registered = match ask_executive(PROBE, None) {
        Ok(VERSION) => false,
        Ok(found) if found == VERSION | IS_REGISTERED => true,
        _ => return Err(UpcallError::NoExecutive),
    };
    let mut registered = match REGISTERED.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
        Err(TryLockError::WouldBlock) => return Err(UpcallError::Busy),
    };
    let process = getpid().as_raw_nonzero().get();
    if is_registered {
        return Err(UpcallError::Busy);
    }
    let system = |what| move |cause: io::Error| UpcallError::System { what, cause };
    let path = options.manager.clone().unwrap_or_else(default_socket);
    let [queue, state] = ask_manager(&path)?;
    let pages = pages(process).map_err(system("reserve memory for upcalls"))?;
    map(pages, &queue, ProtFlags::READ).map_err(system("map the queue of upcalls"))?;
    map(pages + PAGE, &state, ProtFlags::READ | ProtFlags::WRITE)
        .map_err(system("map the state of upcalls"))?;
    let stack = Stack::new(size).map_err(system("map a stack for upcalls"))?;
    USER.store(user, Relaxed);
    FUNCTION.store(function as *mut c_void, Release);
    let ((start, length), (alternate, alternate_length)) = (stack.function(), stack.alternate());
    let registration = Registration {
        function: (deliver as *const ()).expose_provenance() as u64,
        user: 0,
        queue: pages as u64,
        state: (pages + PAGE) as u64,
        stack: start as u64,
        stack_length: length as u64,
        alternate: alternate as u64,
        alternate_length: alternate_length as u64,
    };
    if let Err(errno) = ask_executive(REGISTER, Some(&registration)) {
        // SAFETY: nothing was registered, so nothing runs there.
        unsafe { stack.release() };
        return Err(match errno {
            Errno::BUSY => UpcallError::Busy,
            Errno::PERM => UpcallError::Filtered,
            errno => system("register for upcalls")(errno.into()),
        });
    }
    let thread = gettid().as_raw_nonzero().get();
    // The stack of a function whose thread has ended stays: what it is the alternate stack of is not known.
    *registered = Some(Registered { process, thread, stack });
    Ok(())
}

/// Ends a registration. Afterwards the function is not called any more. The thread that has registered it calls this, which the function
/// itself may do; another thread may where that one has ended.
///
/// # Errors
/// [`UpcallError::NotRegistered`], [`UpcallError::OtherThread`]; [`UpcallError::Busy`] where it has interrupted a call of [`register`].
pub fn unregister() -> Result<(), UpcallError> {
    let mut registered = match REGISTERED.try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
        Err(TryLockError::WouldBlock) => return Err(UpcallError::Busy),
    };
    let process = getpid().as_raw_nonzero().get();
    let Some(own) = registered.take_if(|own| own.process == process) else {
        return Err(UpcallError::NotRegistered);
    };
    match ask_executive(UNREGISTER, None) {
        Err(Errno::PERM) if signals::send_to_thread(process, own.thread, 0).is_ok() => {
            let thread = own.thread;
            *registered = Some(own);
            Err(UpcallError::OtherThread(thread))
        }
        Ok(0) if own.thread == gettid().as_raw_nonzero().get() && !own.stack.is_alternate_stack() => {
            // SAFETY: the executive has ended the registration, and this thread, the only one that ran there, is on another stack, also
            // for signals.
            unsafe { own.stack.release() };
            Ok(())
        }
        // On the stack itself; or the executive has ended it, with the thread or because of a filter.
        _ => Ok(()),
    }
}

/// Returns how many upcalls found no room since the function was registered.
#[must_use]
pub fn dropped() -> u64 {
    let pages = PAGES.load(Acquire);
    if pages == 0 || PAGES_OF.load(Relaxed) != own_process() {
        return 0;
    }
    let queue = ptr::with_exposed_provenance::<Queue>(pages);
    // SAFETY: the page is mapped for the life of this process, cannot become shorter, and consists of atomics.
    unsafe { (*queue).dropped.load(Relaxed) }
}

/// What the executive calls.
unsafe extern "C" fn deliver(number: i64, value: i64, _: *mut c_void) {
    let function = FUNCTION.load(Acquire);
    // SAFETY: only `register` stores there, a function of this type.
    let function = unsafe { std::mem::transmute::<*mut c_void, Option<Function>>(function) };
    // SAFETY: the C library's own place of this thread.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as before; the thread's code is not to see that it was interrupted. The function may be called with that pointer, by the
    // promise of who registered it.
    unsafe {
        let before = *errno;
        if let Some(function) = function {
            function(number, value, USER.load(Relaxed));
        }
        *errno = before;
    }
}

fn own_process() -> usize {
    getpid().as_raw_nonzero().get().unsigned_abs() as usize
}

fn ask_executive(what: u64, registration: Option<&Registration>) -> Result<u64, Errno> {
    let at = registration.map_or(ptr::null(), ptr::from_ref);
    // SAFETY: an option that no kernel has, and that executives answer: they read a `Registration` there.
    let result = unsafe { libc::prctl(NUMBER, what, at, 0_u64, 0_u64) };
    u64::try_from(result)
        .map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL))
}

/// Returns the queue and the state that a manager makes for this process.
fn ask_manager(path: &Path) -> Result<[OwnedFd; 2], UpcallError> {
    let failed = |errno: Errno| UpcallError::Connect { path: path.to_owned(), cause: errno.into() };
    let ask = || -> rustix::io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let address = SocketAddrUnix::new(path)?;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        for which in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, which, Some(PATIENCE))?;
        }
        rustix::net::connect(&socket, &address)?;
        scm::send(socket.as_fd(), &[IoSlice::new(wire::REGISTER)], &[], SendFlags::empty())?;
        let mut reply = vec![0; wire::LONGEST];
        let received = scm::receive(socket.as_fd(), &mut reply, 2, RecvFlags::empty())?;
        reply.truncate(received.length);
        Ok((reply, received.fds))
    };
    let (reply, fds) = ask().map_err(failed)?;
    if let Some(reason) = reply.strip_prefix(wire::REFUSED) {
        return Err(UpcallError::Refused(String::from_utf8_lossy(reason).into_owned()));
    }
    match <[OwnedFd; 2]>::try_from(fds) {
        Ok(fds) if reply == wire::REGISTERED => Ok(fds),
        _ => Err(UpcallError::Reply),
    }
}

/// Returns the place of both pages, which is reserved once in a process.
fn pages(process: i32) -> io::Result<usize> {
    let process = process.unsigned_abs() as usize;
    if PAGES_OF.load(Relaxed) != process {
        // SAFETY: the kernel chooses a free address.
        let at = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                2 * PAGE,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        PAGES.store(at.expose_provenance(), Release);
        PAGES_OF.store(process, Relaxed);
    }
    Ok(PAGES.load(Acquire))
}

/// Maps a page that is shared with the manager, which children do not inherit.
fn map(at: usize, fd: &OwnedFd, access: ProtFlags) -> io::Result<()> {
    let at = ptr::with_exposed_provenance_mut(at);
    let fd: BorrowedFd<'_> = fd.as_fd();
    // SAFETY: the place is one of the reserved pages, and no function is registered that the executive would look at them for.
    unsafe {
        mmap(at, PAGE, access, MapFlags::SHARED | MapFlags::FIXED, fd, 0)?;
        madvise(at, PAGE, Advice::LinuxDontFork)?;
    }
    Ok(())
}
