//! A structure in the kernel's memory: an address, the name of its type, and the kernel that knows both.

use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::types::Field;

/// The longest string that is read.
const LONGEST_STRING: usize = 4096;

/// A structure of the kernel. Copying it copies no memory; each access reads.
#[derive(Clone, Copy)]
pub struct Object<'k> {
    kernel: &'k Kernel,
    kind: &'static str,
    address: u64,
}

impl std::fmt::Display for Object<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {:#x}", self.kind, self.address)
    }
}

impl std::fmt::Debug for Object<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl<'k> Object<'k> {
    pub(crate) fn new(kernel: &'k Kernel, kind: &'static str, address: u64) -> Self {
        Self { kernel, kind, address }
    }

    /// Returns where it is, in the kernel's address space.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the kernel that it belongs to.
    #[must_use]
    pub fn kernel(&self) -> &'k Kernel {
        self.kernel
    }

    /// An error that says that this object contradicts itself.
    pub(crate) fn corrupt(&self, why: impl Into<String>) -> Error {
        Error::Corrupt { kind: self.kind, address: self.address, why: why.into() }
    }

    fn place(&self, path: &'static str) -> Result<(u64, Field)> {
        let field = self.kernel.types().field(self.kind, path)?;
        let address = self.address.checked_add(field.offset);
        Ok((address.ok_or(Error::BadPointer { address: self.address, kind: self.kind })?, field))
    }

    /// Returns whether this type has such a member in this kernel.
    pub fn has(&self, path: &'static str) -> bool {
        self.kernel.types().has(self.kind, path)
    }

    /// Returns the address of a member.
    ///
    /// # Errors
    ///
    /// [`Error::NoMember`].
    pub fn address_of(&self, path: &'static str) -> Result<u64> {
        Ok(self.place(path)?.0)
    }

    /// Returns a number of up to eight bytes, or a bit-field, extended with zeros.
    ///
    /// # Errors
    ///
    /// [`Error::NoMember`], or those of reading.
    pub fn u64(&self, path: &'static str) -> Result<u64> {
        let (address, field) = self.place(path)?;
        let mut bytes = [0; 8];
        let size = usize::try_from(field.size).unwrap_or(usize::MAX);
        let Some(into) = bytes.get_mut(..size) else {
            return Err(self.corrupt(format!("{path} takes {size} bytes and is no number")));
        };
        self.kernel.read(address, into)?;
        let value = u64::from_le_bytes(bytes);
        Ok(match field.bits {
            None => value,
            Some((shift, width)) => (value >> shift) & (u64::MAX >> (64 - u32::from(width.clamp(1, 64)))),
        })
    }

    /// Returns the lowest 32 bits of a number.
    ///
    /// # Errors
    ///
    /// As [`u64`](Self::u64).
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits are what is asked for")]
    pub fn u32(&self, path: &'static str) -> Result<u32> {
        Ok(self.u64(path)? as u32)
    }

    /// Returns the lowest 32 bits of a number, with a sign.
    ///
    /// # Errors
    ///
    /// As [`u64`](Self::u64).
    pub fn i32(&self, path: &'static str) -> Result<i32> {
        Ok(self.u32(path)?.cast_signed())
    }

    /// The structure that a pointer points to; nothing where the pointer is null.
    ///
    /// # Errors
    ///
    /// [`Error::BadPointer`] where it points outside the kernel, or those of reading.
    pub fn pointer(&self, path: &'static str, kind: &'static str) -> Result<Option<Self>> {
        let address = self.u64(path)?;
        if address == 0 { Ok(None) } else { self.kernel.object(kind, address).map(Some) }
    }

    /// The structure that a pointer points to, which must not be null.
    ///
    /// # Errors
    ///
    /// As [`pointer`](Self::pointer), and [`Error::Corrupt`] for null.
    pub fn required(&self, path: &'static str, kind: &'static str) -> Result<Self> {
        self.pointer(path, kind)?.ok_or_else(|| self.corrupt(format!("{path} is null")))
    }

    /// The structure that is a member of this one.
    ///
    /// # Errors
    ///
    /// [`Error::NoMember`].
    pub fn embedded(&self, path: &'static str, kind: &'static str) -> Result<Self> {
        Ok(Self::new(self.kernel, kind, self.place(path)?.0))
    }

    /// The structure `kind` whose member `path` this one is (`container_of`).
    ///
    /// # Errors
    ///
    /// [`Error::NoMember`], [`Error::BadPointer`].
    pub fn container(&self, kind: &'static str, path: &'static str) -> Result<Self> {
        let offset = self.kernel.types().field(kind, path)?.offset;
        self.kernel.object(kind, self.address.wrapping_sub(offset))
    }

    /// Returns a member's bytes as they stand.
    ///
    /// # Errors
    ///
    /// [`Error::NoMember`], or those of reading.
    pub fn bytes(&self, path: &'static str) -> Result<Vec<u8>> {
        let (address, field) = self.place(path)?;
        let mut bytes = vec![0; usize::try_from(field.size).unwrap_or(0).min(1 << 20)];
        self.kernel.read(address, &mut bytes)?;
        Ok(bytes)
    }

    /// A member that is an array of characters, up to its first zero.
    ///
    /// # Errors
    ///
    /// [`Error::NoMember`], or those of reading.
    pub fn text(&self, path: &'static str) -> Result<String> {
        let bytes = self.bytes(path)?;
        let length = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
    }

    /// Returns the string that a pointer points to.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`] where it has no end.
    pub fn string(&self, path: &'static str) -> Result<Vec<u8>> {
        let address = self.u64(path)?;
        let mut string = Vec::new();
        let mut at = address;
        while string.len() < LONGEST_STRING {
            // Never beyond the page that is known to exist.
            let room = 64.min(4096 - at % 4096);
            let mut bytes = vec![0; usize::try_from(room).unwrap_or(1)];
            self.kernel.read(at, &mut bytes)?;
            if let Some(end) = bytes.iter().position(|&byte| byte == 0) {
                string.extend_from_slice(&bytes[..end]);
                return Ok(string);
            }
            string.extend_from_slice(&bytes);
            at = at.wrapping_add(room);
        }
        Err(self.corrupt(format!("{path} points to a string without end")))
    }
}
