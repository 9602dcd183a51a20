//! Objects and mappings of them.

use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::mm::{MapFlags, ProtFlags};

use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::{EXECUTABLE, Handle, PUBLIC};
use orrery_orc_wire::sealed_file::{FileMapping, Immutability, immutability};
use orrery_sys::PAGE;

use crate::client::Client;
use crate::error::{Error, Result};

/// A hold on an object, which is released when this is dropped.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) client: Client,
    pub(crate) generation: u64,
    pub(crate) id: ObjectId,
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Without a store there is nothing to release.
        let _ = self.client.release(self.id, self.generation);
    }
}

/// A read-only descriptor of bytes that never change. The store keeps the object as long as a client has it. Mappings may outlive
/// this, and the store: the kernel keeps their pages.
#[derive(Debug)]
pub struct Object {
    handle: Handle,
    length: usize,
    fd: OwnedFd,
    immutability: Immutability,
    _hold: Hold,
}

impl Object {
    pub(crate) fn new(hold: Hold, handle: Handle, fd: OwnedFd) -> Result<Self> {
        let bad = Error::NotSealed { id: handle.id };
        let Some(end) = handle.offset.checked_add(handle.length) else { return Err(bad) };
        let (Some(immutability), Ok(length)) =
            (immutability(fd.as_fd(), end), usize::try_from(handle.length))
        else {
            return Err(bad);
        };
        if length == 0 {
            return Err(bad);
        }
        Ok(Self { handle, length, fd, immutability, _hold: hold })
    }

    /// Returns its name.
    pub fn id(&self) -> ObjectId {
        self.handle.id
    }

    /// Returns its length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns false: there are no empty objects.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns its offset in its file: small objects share pages.
    pub fn offset(&self) -> u64 {
        self.handle.offset
    }

    /// Returns whether it may be mapped executable.
    pub fn is_executable(&self) -> bool {
        self.handle.flags & EXECUTABLE != 0
    }

    /// Returns whether it is shared by all trust domains.
    pub fn is_public(&self) -> bool {
        self.handle.flags & PUBLIC != 0
    }

    /// Returns whether nobody can change it, not even the store. The store can still write to a file that takes in small objects,
    /// but not to the bytes of those that it has handed out.
    pub fn is_permanent(&self) -> bool {
        self.immutability == Immutability::Permanent
    }

    /// Maps it for reading.
    ///
    /// # Errors
    /// [`Error::System`]: out of address space or of mappings (`vm.max_map_count`).
    pub fn map(&self) -> Result<Mapping> {
        self.map_with(ProtFlags::READ, MapFlags::empty())
    }

    /// Maps it for reading and executing.
    ///
    /// # Errors
    /// [`Error::NotExecutable`]; those of [`Object::map`].
    pub fn map_executable(&self) -> Result<Mapping> {
        if !self.is_executable() {
            return Err(Error::NotExecutable { id: self.id() });
        }
        self.map_with(ProtFlags::READ | ProtFlags::EXEC, MapFlags::empty())
    }

    pub(crate) fn map_with(&self, access: ProtFlags, more: MapFlags) -> Result<Mapping> {
        let page = PAGE as u64;
        let start = self.handle.offset / page * page;
        let skip = usize::try_from(self.handle.offset - start).unwrap_or(0);
        // The mapping is private, so that a debugger can set breakpoints in copies of the pages.
        let flags = MapFlags::PRIVATE | more;
        let mapping = FileMapping::at(self.fd.as_fd(), start, skip + self.length, access, flags)
            .map_err(Error::system("map an object"))?;
        Ok(Mapping { mapping, skip, length: self.length })
    }

    /// Checks that the hash of its bytes is its name, without trusting the store.
    ///
    /// # Errors
    /// [`Error::WrongBytes`]; those of [`Object::map`].
    pub fn verify(&self) -> Result<()> {
        let right = ObjectId::of(&self.map()?) == self.id();
        if right { Ok(()) } else { Err(Error::WrongBytes { id: self.id() }) }
    }
}

impl AsFd for Object {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A mapping of an object, which is unmapped when it is dropped.
#[derive(Debug)]
pub struct Mapping {
    mapping: FileMapping,
    skip: usize,
    length: usize,
}

impl Mapping {
    pub(crate) fn into_file_mapping(self) -> FileMapping {
        self.mapping
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping covers `skip + length` bytes of a file that cannot shrink and whose bytes cannot change, and it
        // lasts as long as `self`.
        unsafe { std::slice::from_raw_parts(self.mapping.start().as_ptr().add(self.skip), self.length) }
    }
}
