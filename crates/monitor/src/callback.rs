//! Calls that a function of one's own decides about.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use syscalls::Sysno;

use crate::Error;
use crate::answer::{Answer, Outcome};
use crate::memory;
use crate::syscall::Syscall;

/// A call that a thread under guard makes, and waits for.
///
/// What its arguments point to may change at any time: copy it once, and decide and act on the copy.
#[derive(Clone, Copy, Debug)]
pub struct Request<'j> {
    syscall: &'j Syscall<'j>,
}

/// What becomes of a call.
#[derive(Debug)]
pub enum Decision {
    /// The policy decides, and the monitor performs it; or, where the policy does not look at this call, the kernel does.
    /// The kernel reads memory anew: for calls that the policy does not look at, decide so by values only.
    ByPolicy,
    /// It returns this.
    Returns(i64),
    /// It fails with this error of errno(3).
    Fails(i32),
    /// It returns a new descriptor of this file, with the close-on-exec flag or without.
    Gives(OwnedFd, bool),
}

type Decide = dyn Fn(&Request<'_>) -> Decision + Send + Sync;

/// Which calls, and the function.
#[derive(Clone)]
pub(crate) struct Callback {
    pub(crate) calls: HashSet<Sysno>,
    decide: Arc<Decide>,
}

impl std::fmt::Debug for Callback {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Callback").field("calls", &self.calls).finish_non_exhaustive()
    }
}

impl Callback {
    /// Mediates the calls of these names.
    pub(crate) fn new<'n>(
        calls: impl IntoIterator<Item = &'n str>,
        decide: impl Fn(&Request<'_>) -> Decision + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        let calls = calls
            .into_iter()
            .map(|name| crate::policy::syscalls::named(name).map_err(Error::Call))
            .collect::<Result<_, _>>()?;
        Ok(Self { calls, decide: Arc::new(decide) })
    }

    /// The answer, or `None` where the policy decides.
    pub(crate) fn ask(&self, syscall: &Syscall<'_>) -> Option<Outcome> {
        match (self.decide)(&Request { syscall }) {
            Decision::ByPolicy => None,
            Decision::Returns(value) => Some(Ok(Answer::Value(value))),
            Decision::Fails(error) => Some(Err(Errno::from_raw_os_error(error))),
            Decision::Gives(file, close_on_exec) => Some(Ok(Answer::File { file, close_on_exec })),
        }
    }
}

impl Request<'_> {
    /// The call's name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.syscall.name()
    }

    /// The calling process.
    #[must_use]
    pub fn process(&self) -> i32 {
        self.syscall.process()
    }

    /// The calling thread.
    #[must_use]
    pub fn thread(&self) -> i32 {
        self.syscall.notification.thread
    }

    /// The arguments, as they stood in registers.
    #[must_use]
    pub fn arguments(&self) -> [u64; 6] {
        self.syscall.notification.arguments
    }

    /// Copies the text that argument `index` points to, such as a path, without its terminating zero.
    ///
    /// # Errors
    /// `EFAULT`, `ENAMETOOLONG`, which the call may well return ([`Decision::Fails`]).
    pub fn text(&self, index: usize) -> std::io::Result<Vec<u8>> {
        Ok(memory::read_path(self.syscall.notification.thread, self.pointer(index)?)?)
    }

    /// Copies `length` bytes that argument `index` points to.
    ///
    /// # Errors
    /// `EFAULT`.
    pub fn bytes(&self, index: usize, length: usize) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        memory::read(self.syscall.notification.thread, self.pointer(index)?, &mut bytes)?;
        Ok(bytes)
    }

    /// Writes to where argument `index` points.
    ///
    /// # Errors
    /// `EFAULT`; `ESRCH` where the caller has gone.
    pub fn write(&self, index: usize, bytes: &[u8]) -> std::io::Result<()> {
        self.syscall.still_waits()?;
        Ok(memory::write(self.syscall.notification.thread, self.pointer(index)?, bytes)?)
    }

    /// The file that is the caller's descriptor `number`.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn descriptor(&self, number: i32) -> std::io::Result<OwnedFd> {
        Ok(self.syscall.caller()?.descriptor(number)?)
    }

    fn pointer(&self, index: usize) -> std::io::Result<u64> {
        self.syscall.notification.arguments.get(index).copied().ok_or_else(|| Errno::INVAL.into())
    }
}
