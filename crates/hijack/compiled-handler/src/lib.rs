//! Compiled in-path handlers: what their compiler hands to who reads a policy, and the checks of that.
//!
//! The compiler (`orrery-handler`, which brings Cranelift) is in a program of its own, `orrery-manager compile-handler`: it reads a
//! module, and writes a [`Reply`]. Who puts a handler behind a policy's table uses this crate alone, and checks what was written:
//! sizes, places, and that the code has none of the [`forbidden`] instructions.

pub mod forbidden;
mod reply;

use orrery_hijack_image::handler::{GLOBALS, MEMORY, STACK, needs};
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use reply::{LARGEST_REPLY, Reply, decode, encode};

/// The program that compiles handlers, among the helper programs.
pub const PROGRAM: &str = "orrery-manager";
/// What it is called with to do so.
pub const COMMAND: &str = "compile-handler";

/// The largest module in bytes, in WebAssembly's binary format.
pub const LARGEST: usize = 64 << 10;
/// The largest text of a module, in bytes.
pub const LARGEST_TEXT: usize = 4 * LARGEST;
/// The largest code that is made of one, in bytes.
pub const LARGEST_CODE: usize = 256 << 10;
/// How many numbers code may load: no module has so many.
pub const MOST_CONSTANTS: usize = 64 << 10;

/// A compiled handler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handler {
    /// Position-independent code.
    pub code: Vec<u8>,
    /// Where in it `decide` begins.
    pub entry: u32,
    /// The beginning of its memory; all behind that is zero.
    pub data: Vec<u8>,
    /// Numbers that the code loads.
    pub constants: Vec<u64>,
    /// What its variables are at first.
    pub globals: [u64; GLOBALS],
    /// How much stack is left when `decide` has its own.
    pub stack: i64,
    /// A set of [`needs`].
    pub needs: u32,
}

/// Why bytes are no compiled handler.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Invalid {
    /// They were written for another executive.
    #[error("it is of another version than this program: install both together")]
    Version,
    /// They cannot be read.
    #[error("what it has written is no compiled handler")]
    Form,
    /// A part is larger than any module needs.
    #[error("the {part} of the compiled handler has a length of {length}, and {limit} at most")]
    Size {
        /// Which part.
        part: &'static str,
        /// How long it is.
        length: usize,
        /// How long it may be.
        limit: usize,
    },
    /// A number in it has no meaning.
    #[error("the compiled handler has {value} as its {part}")]
    Value {
        /// What that is.
        part: &'static str,
        /// The number.
        value: i64,
    },
    /// Its code has what it may not have.
    #[error("the compiled handler has the bytes of `{instruction}` at {offset:#x}")]
    Forbidden {
        /// The instruction.
        instruction: &'static str,
        /// Where in the code.
        offset: usize,
    },
}

impl Handler {
    /// Returns whether it reports events.
    #[must_use]
    pub fn emits(&self) -> bool {
        self.needs & needs::EMITS != 0
    }

    /// Checks what the executive relies on without a look: sizes, places, and instructions.
    ///
    /// That the code is a function at all, and names nothing but its context and its memory, is the compiler's to see to.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), Invalid> {
        for (part, length, limit) in [
            ("code", self.code.len(), LARGEST_CODE),
            ("data", self.data.len(), MEMORY),
            ("list of numbers", self.constants.len(), MOST_CONSTANTS),
        ] {
            if length > limit {
                return Err(Invalid::Size { part, length, limit });
            }
        }
        if usize::try_from(self.entry).is_ok_and(|entry| entry >= self.code.len()) {
            return Err(Invalid::Value { part: "entry", value: self.entry.into() });
        }
        if self.stack < 0 || self.stack.cast_unsigned() > STACK {
            return Err(Invalid::Value { part: "rest of the stack", value: self.stack });
        }
        let uses_memory = self.needs & (needs::WRITES | needs::REPLACES | needs::EMITS) != 0;
        if self.needs & !needs::ALL != 0 || uses_memory && self.needs & needs::MEMORY == 0 {
            return Err(Invalid::Value { part: "set of needs", value: self.needs.into() });
        }
        match forbidden::find(&self.code) {
            None => Ok(()),
            Some((offset, instruction)) => Err(Invalid::Forbidden { instruction, offset }),
        }
    }
}
