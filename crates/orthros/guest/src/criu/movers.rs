//! The calls that move bytes between a program's buffers and what a descriptor stands for, and where their buffers are told.

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{Registers, Task, UserBuffer};

/// `UIO_MAXIOV`.
const MOST_BUFFERS: u64 = 1024;
/// `struct iovec`, and where `struct msghdr` has its list of them and its length.
const VECTOR: usize = 16;
const LIST_IN_MESSAGE: u64 = 16;

/// How a call tells its buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    /// One, by address and length.
    One,
    /// A list, by address and count.
    List,
    /// A message that has the list.
    Message,
}

/// A call that moves bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mover {
    call: i64,
    name: &'static str,
    /// Whether from the program to what the descriptor stands for.
    pub(super) writes: bool,
    told: Told,
}

macro_rules! movers {
    ($($name:ident $told:ident $writes:literal;)*) => {
        &[$(Mover { call: libc::$name, name: stringify!($name), writes: $writes, told: Told::$told }),*]
    };
}

/// All of them.
pub(super) const MOVERS: &[Mover] = movers! {
    SYS_read One false;
    SYS_write One true;
    SYS_readv List false;
    SYS_writev List true;
    SYS_recvfrom One false;
    SYS_sendto One true;
    SYS_recvmsg Message false;
    SYS_sendmsg Message true;
};

/// The one of this number.
pub(super) fn mover(call: i64) -> Option<&'static Mover> {
    MOVERS.iter().find(|mover| mover.call == call)
}

impl Mover {
    /// As it is called.
    pub(super) fn name(&self) -> &'static str {
        self.name.trim_start_matches("SYS_")
    }

    /// The buffers of a call, from its arguments.
    pub(super) fn buffers(&self, thread: &Task<'_>, registers: &Registers) -> Result<Vec<UserBuffer>> {
        let space = thread.address_space()?.context("it has no memory")?;
        let pair = |address: u64| -> Result<(u64, u64)> {
            let mut bytes = [0; VECTOR];
            space.read(address, &mut bytes)?;
            let word = |at: usize| bytes[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
            Ok((word(0), word(8)))
        };
        let (list, count) = match self.told {
            Told::One => {
                return Ok(vec![UserBuffer { address: registers.si, length: registers.dx }]);
            }
            Told::List => (registers.si, registers.dx),
            Told::Message => pair(registers.si.wrapping_add(LIST_IN_MESSAGE))?,
        };
        if count > MOST_BUFFERS {
            bail!("{count} buffers");
        }
        let one = |index: u64| -> Result<UserBuffer> {
            let (address, length) = pair(list.wrapping_add(index * VECTOR as u64))?;
            Ok(UserBuffer { address, length })
        };
        (0..count).map(one).collect()
    }
}
