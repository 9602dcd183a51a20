//! Why a module is no handler.

use thiserror::Error;

/// Why a module is no handler.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It is too large.
    #[error("it has {size} bytes, and a handler has {limit} at most")]
    Size {
        /// Its size in bytes.
        size: usize,
        /// The largest size that is allowed.
        limit: usize,
    },
    /// Its text cannot be read.
    #[error("{0}")]
    Text(String),
    /// It is no valid module of what handlers may use.
    #[error("{message} (at byte {offset:#x} of the module)")]
    Module {
        /// What is wrong.
        message: String,
        /// Where, in bytes from the module's beginning.
        offset: usize,
    },
    /// It has something that handlers cannot have.
    #[error("{what} (at byte {offset:#x} of the module): {instead}")]
    Refused {
        /// What that is.
        what: String,
        /// Where, in bytes from the module's beginning.
        offset: usize,
        /// Why not, or what to do instead.
        instead: &'static str,
    },
    /// It does not export what the executive calls.
    #[error("it exports no function `decide` that takes the call's number, an i32, and returns an i32")]
    NoDecide,
    /// A function's variables need too much of the stack.
    #[error("function {index} needs {size} bytes of stack, and all functions together have {limit}")]
    Stack {
        /// Which function, counted with imports.
        index: u32,
        /// What it needs.
        size: u64,
        /// What there is.
        limit: u64,
    },
    /// Its code is too large.
    #[error("its code has {size} bytes, and that of a handler {limit} at most")]
    Code {
        /// Its size in bytes.
        size: usize,
        /// The largest size that is allowed.
        limit: usize,
    },
    /// Bytes of its code would be an instruction that it may not have, however it is compiled.
    #[error(
        "its code has the bytes of `{instruction}` at {offset:#x}, however it is compiled: change its constants"
    )]
    Forbidden {
        /// The instruction.
        instruction: &'static str,
        /// Where in the code.
        offset: usize,
    },
    /// The compiler failed.
    #[error("the compiler failed at function {index}: {message}")]
    Compiler {
        /// Which function, counted with imports.
        index: u32,
        /// What it said.
        message: String,
    },
}

impl Fault {
    pub(crate) fn refused(what: impl Into<String>, offset: usize, instead: &'static str) -> Self {
        Self::Refused { what: what.into(), offset, instead }
    }
}

impl From<wasmparser::BinaryReaderError> for Fault {
    fn from(error: wasmparser::BinaryReaderError) -> Self {
        Self::Module { message: error.message().to_owned(), offset: error.offset() }
    }
}
