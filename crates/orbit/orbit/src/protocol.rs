//! What a call looks like in the queue, and what an answer does.
//!
//! Plain bytes in native order; the reader checks every field.

use core::ffi::{c_long, c_ulong, c_void};

/// What a task runs.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum Function {
    /// A Rust function.
    Rust(fn(&mut crate::Task<'_>) -> i64),
    /// A C function of arguments and store.
    C(unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_long),
    /// A C function of store and arguments, as programs for the authors' library have them.
    StoreFirst(unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_ulong),
}

impl Function {
    /// Returns whether its address comes from outside and has to be checked.
    pub(crate) fn is_foreign(self) -> bool {
        !matches!(self, Self::Rust(_))
    }

    pub(crate) fn address(self) -> usize {
        match self {
            Self::Rust(function) => function as usize,
            Self::C(function) => function as usize,
            Self::StoreFirst(function) => function as usize,
        }
    }

    fn kind(self) -> u32 {
        match self {
            Self::Rust(_) => 1,
            Self::C(_) => 2,
            Self::StoreFirst(_) => 3,
        }
    }
}

impl core::fmt::Debug for Function {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Function({:#x})", self.address())
    }
}

/// The fixed part of a request; the arguments follow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) call: u64,
    pub(crate) function: Option<Function>,
    /// In nanoseconds; 0 for none.
    pub(crate) limit: u64,
    pub(crate) delta: u64,
}

/// The size of a request in bytes.
pub(crate) const REQUEST: usize = 40;

impl Request {
    pub(crate) fn encode(&self) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        let (kind, address) = self.function.map_or((0, 0), |function| (function.kind(), function.address()));
        bytes[..8].copy_from_slice(&self.call.to_ne_bytes());
        bytes[8..16].copy_from_slice(&(address as u64).to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.limit.to_ne_bytes());
        bytes[24..32].copy_from_slice(&self.delta.to_ne_bytes());
        bytes[32..36].copy_from_slice(&kind.to_ne_bytes());
        bytes
    }

    /// Returns the request at the start of `bytes`, and its arguments.
    ///
    /// # Safety
    /// The bytes were written by main, which only sends functions that exist.
    pub(crate) unsafe fn decode(bytes: &[u8]) -> Option<Self> {
        let head: &[u8; REQUEST] = bytes.first_chunk()?;
        let word = |at: usize| {
            let mut eight = [0; 8];
            eight.copy_from_slice(&head[at..at + 8]);
            u64::from_ne_bytes(eight)
        };
        let kind = u32::from_ne_bytes([head[32], head[33], head[34], head[35]]);
        let address = core::ptr::with_exposed_provenance::<()>(usize::try_from(word(8)).ok()?);
        let function = match kind {
            0 => None,
            _ if address.is_null() => return None,
            // SAFETY: main says that there is a function of this kind, and code is at the same place in both processes.
            1 => Some(Function::Rust(unsafe {
                core::mem::transmute::<*const (), fn(&mut crate::Task<'_>) -> i64>(address)
            })),
            // SAFETY: main says that the function is of this kind, and code is at the same place in both
            // processes.
            2 => Some(Function::C(unsafe {
                core::mem::transmute::<*const (), unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_long>(
                    address,
                )
            })),
            // SAFETY: main says that the function is of this kind, and code is at the same place in both
            // processes.
            3 => Some(Function::StoreFirst(unsafe {
                core::mem::transmute::<*const (), unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_ulong>(
                    address,
                )
            })),
            _ => return None,
        };
        Some(Self { call: word(0), function, limit: word(16), delta: word(24) })
    }

    /// Returns what tells one call from another for the "same argument" flags: function and arguments.
    pub(crate) fn likeness(message: &[u8]) -> Option<(&[u8], &[u8])> {
        Some((message.get(8..16)?, message.get(REQUEST..)?))
    }
}

/// An answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) call: u64,
    pub(crate) value: i64,
}

/// The size of an answer in bytes.
pub(crate) const ANSWER: usize = 16;

impl Answer {
    pub(crate) fn encode(self) -> [u8; ANSWER] {
        let mut bytes = [0; ANSWER];
        bytes[..8].copy_from_slice(&self.call.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.value.to_ne_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (call, value) = bytes.split_first_chunk::<8>()?;
        Some(Self { call: u64::from_ne_bytes(*call), value: i64::from_ne_bytes(value.try_into().ok()?) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_come_back() {
        fn task(_: &mut crate::Task<'_>) -> i64 {
            0
        }
        let request = Request { call: 7, function: Some(Function::Rust(task)), limit: 5, delta: 9 };
        let mut bytes = request.encode().to_vec();
        bytes.extend(b"args");
        // SAFETY: the bytes are what `encode` wrote, with a function that exists.
        let back = unsafe { Request::decode(&bytes) }.unwrap();
        assert_eq!((back.call, back.limit, back.delta), (7, 5, 9));
        assert_eq!(back.function.unwrap().address(), Function::Rust(task).address());
        assert_eq!(Request::likeness(&bytes).unwrap().1, b"args");
        bytes[32] = 77;
        // SAFETY: refused before anything is made of it.
        assert!(unsafe { Request::decode(&bytes) }.is_none());
        // SAFETY: a request that is too short is refused before anything is made of it.
        assert!(unsafe { Request::decode(&bytes[..20]) }.is_none());
        let answer = Answer { call: 1, value: -3 };
        assert_eq!(Answer::decode(&answer.encode()), Some(answer));
        assert_eq!(Answer::decode(&[0; 15]), None);
    }
}
