//! In-path handlers: what their compiled code and the executive agree on.
//!
//! A handler is a WebAssembly module, compiled to position-independent code that is behind the policy's table. The executive
//! calls `decide` with a [`Context`] on its stack: the code reads and writes that, the handler's own memory, and nothing else.

use core::mem::offset_of;

/// How many bytes of memory a handler has, if it has some: WebAssembly's page.
pub const MEMORY: usize = 64 << 10;
/// In such pieces memory is remembered as written to, and made again what it was.
pub const BLOCK: usize = 4 << 10;
/// How many variables that change a handler can have.
pub const GLOBALS: usize = 8;
/// How many of a module's instructions a decision may take: each time around a loop, and each call of a function, all of its own count.
pub const FUEL: i64 = 1 << 20;
/// How many bytes of stack all functions of a handler may use together.
pub const STACK: u64 = 1 << 10;
/// What a call of one of the executive's functions costs, beside a unit for each byte.
pub const HOST_CALL: i64 = 256;
/// How many counters a process has, which the handlers of its policy share. Each is a word, and they alone stay from one decision to the next.
pub const COUNTERS: usize = 64;
/// The longest time that a handler can have a call wait, in nanoseconds.
pub const LONGEST_DELAY: u64 = 1_000_000_000;

/// What a handler is run with. Its code names fields by their offsets.
#[repr(C)]
#[derive(Debug)]
pub struct Context {
    /// Where its memory is: [`MEMORY`] bytes, if the handler needs some.
    pub memory: u64,
    /// Which [`BLOCK`]s of that were written to, one bit each.
    pub dirty: u64,
    /// What is left of [`FUEL`].
    pub fuel: i64,
    /// How much stack is left.
    pub stack: i64,
    /// Not zero: the handler has failed, and this says why, see [`trap`].
    pub trap: u64,
    /// Where its [`Handler::constants`] are.
    pub constants: u64,
    /// The call's arguments, as the program gave them.
    pub given: [u64; 6],
    /// What it is to be performed with.
    pub arguments: [u64; 6],
    /// What it is to return, where that is decided.
    pub result: i64,
    /// How many nanoseconds it is to wait first.
    pub delay: u64,
    /// Variables.
    pub globals: [u64; GLOBALS],
    /// Where the executive's functions are, by [`host`].
    pub functions: [u64; host::COUNT],
    /// What these need.
    pub host: u64,
    /// Where the process's [`COUNTERS`] are: words that are added to in one step.
    pub counters: u64,
}

/// Functions of the executive that a handler can call.
pub mod host {
    /// Copies from what an argument points to.
    pub const COPY_FROM: usize = 0;
    /// Has an argument point to a copy of the handler's bytes.
    pub const REPLACE: usize = 1;
    /// Writes an event to the journal.
    pub const EMIT: usize = 2;
    /// How many there are.
    pub const COUNT: usize = 3;
}

/// What `decide` returns.
pub mod verdict {
    /// The call goes on, with its arguments as they are now: further rules are asked.
    pub const PASS: i32 = 0;
    /// The call is performed, and further rules are skipped.
    pub const ALLOW: i32 = 1;
    /// The call returns [`super::Context::result`], and is not performed.
    pub const ANSWER: i32 = 2;
    /// The smallest negative number that is an error; all from here to -1 deny the call with it.
    pub const LEAST_ERROR: i32 = -4095;
}

/// Why a handler has failed.
pub mod trap {
    /// It executed `unreachable`.
    pub const UNREACHABLE: u64 = 1;
    /// It named memory that it does not have, or an argument beyond the sixth.
    pub const BOUNDS: u64 = 2;
    /// It divided by zero, or the quotient has no room.
    pub const DIVISION: u64 = 3;
    /// It used up its fuel.
    pub const FUEL: u64 = 4;
    /// It used up its stack.
    pub const STACK: u64 = 5;
    /// It returned what is no verdict.
    pub const VERDICT: u64 = 6;
}

/// A handler, in the policy's table.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Handler {
    /// Where `decide` is, in bytes from the table's start.
    pub entry: u32,
    /// A set of [`needs`].
    pub needs: u32,
    /// Where the beginning of its memory is that is not zero, in bytes from the table's start, and how long.
    pub data: crate::policy::Text,
    /// Where numbers are that its code loads: eight bytes each.
    pub constants: crate::policy::Text,
    /// How much stack is left when `decide` has its own.
    pub stack: i64,
    /// What its variables are at first.
    pub globals: [u64; GLOBALS],
}

/// What a handler needs, one bit each. One that needs nothing compares arguments and numbers, and says what becomes of the call: it is
/// given no more of its context than [`Context::given`] and what failures, fuel, stack and numbers are kept in.
pub mod needs {
    /// Memory.
    pub const MEMORY: u32 = 1;
    /// Memory of its own, that it writes to.
    pub const WRITES: u32 = 2;
    /// Room for copies that arguments point to.
    pub const REPLACES: u32 = 4;
    /// The journal.
    pub const EMITS: u32 = 8;
    /// Variables.
    pub const VARIABLES: u32 = 16;
    /// To change the call's arguments, what it returns, or when it is made.
    pub const CHANGES: u32 = 32;
    /// The counters.
    pub const COUNTS: u32 = 64;
    /// All of these.
    pub const ALL: u32 = MEMORY | WRITES | REPLACES | EMITS | VARIABLES | CHANGES | COUNTS;
}

/// A number that is another one for code which agrees with another executive: the compiler is in a program of its own.
pub const LAYOUT: u64 = {
    let places = [
        offset_of!(Context, memory),
        offset_of!(Context, dirty),
        offset_of!(Context, fuel),
        offset_of!(Context, stack),
        offset_of!(Context, trap),
        offset_of!(Context, constants),
        offset_of!(Context, given),
        offset_of!(Context, arguments),
        offset_of!(Context, result),
        offset_of!(Context, delay),
        offset_of!(Context, globals),
        offset_of!(Context, functions),
        offset_of!(Context, host),
        offset_of!(Context, counters),
        COUNTERS,
        size_of::<Context>(),
        host::COPY_FROM,
        host::REPLACE,
        host::EMIT,
        MEMORY,
        BLOCK,
    ];
    // The first number is to change with the meaning of the same fields.
    let mut hash =
        mixed(mixed(mixed(0xcbf2_9ce4_8422_2325 + 1, HOST_CALL.cast_unsigned()), STACK), needs::ALL as u64);
    let mut index = 0;
    while index < places.len() {
        hash = mixed(hash, places[index] as u64);
        index += 1;
    }
    hash
};

/// Mixes a word into a hash, after FNV-1a.
const fn mixed(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3)
}
