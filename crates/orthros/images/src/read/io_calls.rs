//! The system calls that transfer bytes between a program's buffers and a file descriptor, and how they pass their
//! buffers.

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{Registers, Task, UserBuffer};

/// `UIO_MAXIOV`.
const MOST_BUFFERS: u64 = 1024;
/// `struct iovec`, and where `struct msghdr` has its list of them and its length.
const VECTOR: usize = 16;
const LIST_IN_MESSAGE: u64 = 16;

/// How a call passes its buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Passing {
    /// One, by address and length.
    One,
    /// A list, by address and count.
    List,
    /// A message that has the list.
    Message,
}

/// A call that transfers bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct IoCall {
    call: i64,
    name: &'static str,
    /// Whether it transfers from the program to the file descriptor.
    pub(super) writes: bool,
    passing: Passing,
}

macro_rules! io_calls {
    ($($name:ident $passing:ident $writes:literal;)*) => {
        &[$(IoCall { call: libc::$name, name: stringify!($name), writes: $writes, passing: Passing::$passing }),*]
    };
}

/// All calls that transfer bytes.
pub(super) const IO_CALLS: &[IoCall] = io_calls! {
    SYS_read One false;
    SYS_write One true;
    SYS_readv List false;
    SYS_writev List true;
    SYS_recvfrom One false;
    SYS_sendto One true;
    SYS_recvmsg Message false;
    SYS_sendmsg Message true;
};

/// Returns the call of this number.
pub(super) fn find(call: i64) -> Option<&'static IoCall> {
    IO_CALLS.iter().find(|known| known.call == call)
}

impl IoCall {
    /// Returns the name of the call.
    pub(super) fn name(&self) -> &'static str {
        self.name.trim_start_matches("SYS_")
    }

    /// Returns the buffers of a call, from its arguments.
    pub(super) fn buffers(&self, thread: &Task<'_>, registers: &Registers) -> Result<Vec<UserBuffer>> {
        let space = thread.address_space()?.context("it has no memory")?;
        let pair = |address: u64| -> Result<(u64, u64)> {
            let mut bytes = [0; VECTOR];
            space.read(address, &mut bytes)?;
            let word = |at: usize| bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
            Ok((word(0), word(8)))
        };
        let (list, count) = match self.passing {
            Passing::One => {
                return Ok(vec![UserBuffer { address: registers.si, length: registers.dx }]);
            }
            Passing::List => (registers.si, registers.dx),
            Passing::Message => pair(registers.si.wrapping_add(LIST_IN_MESSAGE))?,
        };
        if count > MOST_BUFFERS {
            bail!("it has {count} buffers");
        }
        let one = |index: u64| -> Result<UserBuffer> {
            let (address, length) = pair(list.wrapping_add(index * VECTOR as u64))?;
            Ok(UserBuffer { address, length })
        };
        (0..count).map(one).collect()
    }
}
