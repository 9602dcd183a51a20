//! The table that a policy is compiled to. An executive reads it, in memory that nobody can write to.
//!
//! Integers and offsets only: it is written by the supervisor, into a process whose addresses are others. All offsets count
//! from the table's start.

use crate::capture::{ArgCapture, CAPTURES};

pub use crate::capture::NO_ARGUMENT;
use crate::nr::CALLS;

/// How many rules a policy can have.
pub const RULES: usize = 256;
/// How many patterns for callers a policy can have: one bit each.
pub const CALLERS: usize = 64;
/// Says that a table is one.
pub const MAGIC: u64 = 0x7972_7272_6f70_6f6c;

/// Some bytes of the table.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Text {
    /// The offset of the first byte.
    pub start: u32,
    /// How many they are; none: nothing is said.
    pub length: u32,
}

/// Some of the table's references to rules.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Span {
    /// The first.
    pub first: u16,
    /// The number of elements.
    pub count: u16,
}

/// Which arguments of a call are what; [`NO_ARGUMENT`] where none is.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// The arguments that are paths.
    pub path: [u8; 2],
    /// The descriptors of directories from which these are looked up.
    pub directory: [u8; 2],
    /// The descriptor that the call is about.
    pub descriptor: u8,
    /// A number of bytes, which stands behind its buffer.
    pub count: u8,
    /// A list of buffers, which stands before its length.
    pub vector: u8,
    /// The address of a socket, which stands before its length.
    pub address: u8,
}

impl Shape {
    /// A call of which nothing is known.
    pub const NONE: Self = Self {
        path: [NO_ARGUMENT; 2],
        directory: [NO_ARGUMENT; 2],
        descriptor: NO_ARGUMENT,
        count: NO_ARGUMENT,
        vector: NO_ARGUMENT,
        address: NO_ARGUMENT,
    };
}

/// The table's beginning. Rules and references to them follow; texts come last.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Table {
    /// [`MAGIC`].
    pub magic: u64,
    /// How many bytes the table has.
    pub length: u64,
    /// Not zero: some rule does more than log.
    pub decides: u64,
    /// What becomes of programs that cannot be followed: one of [`unfollowed`].
    pub unfollowed: u64,
    /// Signals that are told of when a handler of the program's gets them, one bit each: SIGHUP is the lowest.
    pub signals: u64,
    /// Device and inode of the file to which messages about them go, where it is standard error.
    pub messages: [u64; 2],
    /// Where the rules are, and how many.
    pub rules: Text,
    /// Where the references are: a `u16` each, the index of a rule.
    pub references: Text,
    /// Where the patterns for callers are: a [`Text`] each.
    pub callers: Text,
    /// Where the mounts are, and how many: a [`Mount`] each.
    pub mounts: Text,
    /// Where the handlers are, and how many: a [`crate::handler::Handler`] each.
    pub handlers: Text,
    /// Where their code is: whole pages, at the table's end.
    pub code: Text,
    /// The automaton of all path patterns: see [`crate::automaton`]; none: patterns are asked one by one.
    pub automaton: Text,
    /// For each call, its references.
    pub calls: [Span; CALLS + 1],
    /// What is known of the calls.
    pub shapes: [Shape; CALLS + 1],
    /// What is captured of the memory that their arguments point to.
    pub captures: [[ArgCapture; CAPTURES]; CALLS + 1],
}

/// A file system that is seen at a path where the kernel has none.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Mount {
    /// The path where programs see it, without slash at its end.
    pub prefix: Text,
    /// The path where it can be reached.
    pub backing: Text,
    /// Its device number, by which its files are recognized.
    pub device: u64,
}

/// One rule: conditions, all of which must hold, and what is done then.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rule {
    /// Where on the shared page its hits are counted.
    pub counter: u32,
    /// Acts on each n-th hit only; zero is one.
    pub every: u32,
    /// Does not act on so many hits at first.
    pub after: u32,
    /// Acts so often at most; zero: without limit.
    pub times: u32,
    /// Kinds of descriptors, as a set of [`kinds`]; zero: any.
    pub kinds: u32,
    /// One of [`action`].
    pub action: u32,
    /// One of [`log`].
    pub log: u32,
    /// How much of the path pattern is replaced by the target.
    pub prefix: u32,
    /// Not zero: it is asked about a look at a file by its descriptor, too: an `fstat` that is made as `newfstatat` or
    /// `statx` with an empty path.
    pub descriptors: u32,
    /// Not zero: what it does needs the room that paths have.
    pub room: u32,
    /// What the call returns, how many bytes it gets, or the index of the handler that decides.
    pub value: i64,
    /// Not zero: it is nothing but a handler, which [needs](crate::handler::needs) nothing.
    pub bare: u64,
    /// Nanoseconds to wait first.
    pub delay: u64,
    /// Callers, one of which it must be; zero: any.
    pub callers: u64,
    /// The place that calls, by its hash; zero: any.
    pub site: u64,
    /// Patterns, one of which a path must match.
    pub path: Text,
    /// The automaton's bit for these patterns; zero: it has none.
    pub fits: u64,
    /// What the path's beginning is replaced by, or an address to connect to.
    pub target: Text,
    /// An address to which the call goes.
    pub address: Address,
}

/// An address of a socket.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Address {
    /// `AF_*`; zero matches every family.
    pub family: u16,
    /// The port; zero: any.
    pub port: u16,
    /// How many bits of the address count.
    pub bits: u32,
    /// The address.
    pub bytes: [u8; 16],
    /// For `AF_UNIX`: patterns for the path.
    pub path: Text,
}

/// Kinds of descriptors.
pub mod kinds {
    /// A regular file.
    pub const FILE: u32 = 1;
    /// A directory.
    pub const DIRECTORY: u32 = 2;
    /// A socket.
    pub const SOCKET: u32 = 4;
    /// A pipe.
    pub const PIPE: u32 = 8;
    /// A character device: a terminal, for instance.
    pub const CHARACTER: u32 = 16;
    /// A block device.
    pub const BLOCK: u32 = 32;
    /// Anything else: an event counter, for instance.
    pub const OTHER: u32 = 64;
}

/// Whether a call is logged in the journal.
pub mod log {
    /// The call is logged.
    pub const CALLS: u32 = 1;
    /// The call is logged with the place that it came from.
    pub const PLACES: u32 = 2;
}

/// What becomes of a program that is executed and cannot be followed.
pub mod unfollowed {
    /// It runs, and is counted.
    pub const PASS: u64 = 0;
    /// The same, with a message.
    pub const WARN: u64 = 1;
    /// It is not executed.
    pub const REFUSE: u64 = 2;

    /// How a message about it begins; the reason follows.
    pub const PROBLEM: &str = "orrery: cannot apply the policy to a program: ";
    /// How one ends that it was refused with.
    pub const REFUSED: &str = "; refused (--no-strict lets it run without the policy)\n";
    /// How a warning ends.
    pub const WARNED: &str = "; it runs without the policy\n";

    /// Returns the parts of the message about it, for this treatment.
    pub const fn message(treatment: u64, reason: &str) -> [&str; 3] {
        [PROBLEM, reason, if treatment == REFUSE { REFUSED } else { WARNED }]
    }
}

/// What a rule does with a call.
pub mod action {
    /// Nothing: further rules decide.
    pub const NONE: u32 = 0;
    /// Lets it be performed, and skips further rules.
    pub const ALLOW: u32 = 1;
    /// Returns a value without performing it.
    pub const ANSWER: u32 = 2;
    /// Has it transfer fewer bytes.
    pub const SHORT: u32 = 3;
    /// Has it use another path.
    pub const REWRITE: u32 = 4;
    /// Has it connect to another address.
    pub const REDIRECT: u32 = 5;
    /// Has a handler decide.
    pub const HANDLER: u32 = 6;
}

const _: () = assert!(size_of::<Table>().is_multiple_of(8) && size_of::<Rule>().is_multiple_of(8));
