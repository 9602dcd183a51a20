//! In-path handlers: WebAssembly modules that decide system calls inside the executive, at the price of a function call.
//!
//! ```text
//!  handler.wat ---> parse, check ---> translate (Cranelift) ---> link ---> scan ---> code behind the policy's table
//! ```
//!
//! A handler is a module of integers: it may have functions, variables, one page of memory, and may import the functions of
//! [`interface`]. Whatever else is in it is refused, by name and position. The code that is made of it
//!
//! - is position-independent, names nothing outside of itself, and reads and writes nothing but its
//!   [`Context`](orrery_hijack_image::handler::Context) and its memory: each access is compared with the memory's end;
//! - ends: fuel is taken off at each time around a loop and at each call, stack at each call, and where there is none left the
//!   handler has failed;
//! - has no instruction that enters the kernel or changes what memory the program may reach, at no offset into any other:
//!   see [`forbidden`].
//!
//! A handler that fails returns all the way, and the context says why: nothing traps.

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("handlers are compiled for executives, which there are for Linux on x86-64 only");

mod emit;
mod error;
pub mod forbidden;
pub mod interface;
mod module;
mod translate;

use orrery_hijack_image::handler::{GLOBALS, needs};

pub use error::Fault;

/// The largest module in bytes, in WebAssembly's binary format.
pub const LARGEST: usize = 64 << 10;
/// The largest code that is made of one, in bytes.
pub const LARGEST_CODE: usize = 256 << 10;

/// A compiled handler.
#[derive(Clone, Debug, PartialEq, Eq)]
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

impl Handler {
    /// Compiles a module, in WebAssembly's binary format or as its text (`.wat`).
    ///
    /// # Errors
    /// What in it a handler cannot have, and where.
    pub fn compile(source: &[u8]) -> Result<Self, Fault> {
        if source.len() > 4 * LARGEST {
            return Err(Fault::Size { size: source.len(), limit: 4 * LARGEST });
        }
        let binary = wat::parse_bytes(source).map_err(|error| Fault::Text(error.to_string()))?;
        if binary.len() > LARGEST {
            return Err(Fault::Size { size: binary.len(), limit: LARGEST });
        }
        let module = module::Module::parse(&binary)?;
        emit::emit(&module)
    }

    /// Returns whether it reports events.
    #[must_use]
    pub fn emits(&self) -> bool {
        self.needs & needs::EMITS != 0
    }
}
