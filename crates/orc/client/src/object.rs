//! An object in a program's hands: a capability, and mappings of it.

use core::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::mm::{MapFlags, ProtFlags};

use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::{EXECUTABLE, Handle, PUBLIC};
use orrery_orc_wire::sealed_file::{Strength, Window, strength};
use orrery_sys::PAGE;

use crate::client::Client;
use crate::error::{Error, Result};

/// A hold, which ends when it is dropped.
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

/// A read-only descriptor of bytes that never change, with bounds. As long as there is one, the store keeps the object; mappings
/// live longer than it, if need be, as the kernel keeps them.
#[derive(Debug)]
pub struct Object {
    handle: Handle,
    length: usize,
    fd: OwnedFd,
    strength: Strength,
    _hold: Hold,
}

impl Object {
    pub(crate) fn new(hold: Hold, handle: Handle, fd: OwnedFd) -> Result<Self> {
        let bad = Error::NotSealed { id: handle.id };
        let Some(end) = handle.offset.checked_add(handle.length) else { return Err(bad) };
        let (Some(strength), Ok(length)) = (strength(fd.as_fd(), end), usize::try_from(handle.length)) else {
            return Err(bad);
        };
        if length == 0 {
            return Err(bad);
        }
        Ok(Self { handle, length, fd, strength, _hold: hold })
    }

    /// Its name.
    pub fn id(&self) -> ObjectId {
        self.handle.id
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Never: there are no empty objects.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Where it begins in its memory file: small objects share pages.
    pub fn offset(&self) -> u64 {
        self.handle.offset
    }

    /// Whether it may be mapped executable.
    pub fn is_executable(&self) -> bool {
        self.handle.flags & EXECUTABLE != 0
    }

    /// Whether it is everybody's.
    pub fn is_public(&self) -> bool {
        self.handle.flags & PUBLIC != 0
    }

    /// Whether nobody at all can change it. Small objects in a file that still takes in others are only safe from everybody but
    /// the store.
    pub fn is_sealed_for_good(&self) -> bool {
        self.strength == Strength::ForGood
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
        // Private, so that debuggers can set breakpoints in copies of their own.
        let flags = MapFlags::PRIVATE | more;
        let window = Window::at(self.fd.as_fd(), start, skip + self.length, access, flags)
            .map_err(Error::system("map an object"))?;
        Ok(Mapping { window, skip, length: self.length })
    }

    /// Hashes all of it and compares with its name: the store need not be believed.
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

/// An object in memory, until it is dropped.
#[derive(Debug)]
pub struct Mapping {
    window: Window,
    skip: usize,
    length: usize,
}

impl Mapping {
    pub(crate) fn into_window(self) -> Window {
        self.window
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the window covers `skip + length` bytes of a file that cannot shrink and whose bytes cannot change; it
        // stays mapped as long as `self`.
        unsafe { core::slice::from_raw_parts(self.window.start().as_ptr().add(self.skip), self.length) }
    }
}
