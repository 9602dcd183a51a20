//! Text of bounded length, made without an allocator.

use std::fmt;

/// At most `ROOM` bytes; what does not fit is cut off, and the writer gets an error.
pub(crate) struct Text<const ROOM: usize> {
    bytes: [u8; ROOM],
    len: usize,
}

impl<const ROOM: usize> Text<ROOM> {
    pub(crate) fn new() -> Self {
        Self { bytes: [0; ROOM], len: 0 }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<const ROOM: usize> fmt::Write for Text<ROOM> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for &byte in text.as_bytes() {
            *self.bytes.get_mut(self.len).ok_or(fmt::Error)? = byte;
            self.len += 1;
        }
        Ok(())
    }
}
