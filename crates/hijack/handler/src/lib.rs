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
//!   [`Context`](orrery_hijack_image::handler::Context), its memory and the process's counters: each access is compared with their end;
//! - ends: fuel is taken off at each time around a loop and at each call, stack at each call, and where there is none left the
//!   handler has failed;
//! - has no instruction that enters the kernel or changes what memory the program may reach, at no offset into any other:
//!   see [`forbidden`](orrery_compiled_handler::forbidden).
//!
//! A handler that fails returns all the way, and the context says why: nothing traps.
//!
//! The compiler is larger than all that needs handlers. So it is in a program of its own, which [`serve`] is the body of; who reads
//! a policy executes that, and checks what it gets: see [`orrery_compiled_handler`].

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("handlers are compiled for executives, which there are for Linux on x86-64 only");

mod emit;
mod error;
pub mod interface;
mod module;
mod program;
mod translate;

use orrery_compiled_handler::{Handler, LARGEST, LARGEST_TEXT};

pub use error::Fault;
pub use program::serve;

/// Compiles a module, in WebAssembly's binary format or as its text (`.wat`).
///
/// # Errors
/// What in it a handler cannot have, and where.
pub fn compile(source: &[u8]) -> Result<Handler, Fault> {
    if source.len() > LARGEST_TEXT {
        return Err(Fault::Size { size: source.len(), limit: LARGEST_TEXT });
    }
    let binary = wat::parse_bytes(source).map_err(|error| Fault::Text(error.to_string()))?;
    if binary.len() > LARGEST {
        return Err(Fault::Size { size: binary.len(), limit: LARGEST });
    }
    let module = module::Module::parse(&binary)?;
    emit::emit(&module)
}
