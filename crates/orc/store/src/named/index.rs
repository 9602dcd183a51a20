//! The index of a trust domain: a file in which programs look up what they would otherwise ask the store for.
//!
//! A round trip to the store wakes another process up, which takes as long as a small program needs to start. So the
//! store also publishes its replies in a file:
//!
//! ```text
//! 0      8       16      24    32          512
//! | magic | slots | start | end | base ...  | slot | slot | ...
//!
//! slot:  | state | key, 8 words | value, 3 words | name, 160 bytes |
//! ```
//!
//! | key | value | name |
//! |---|---|---|
//! | 1, device, inode, size, time of modification, of change, [mount](crate::client_file): a file | bytes from its beginning, flags | of the object |
//! | 2, key: a library | its address | |
//! | 3, key, address, start, length: a library's relocated data | bytes | of the object |
//! | 4, key, address, start: its [prelinked](crate::libraries::prelink) data | bytes, relocations, tag of the library's object | of the object |
//!
//! `base` is the directory of the objects, if it is not that of the index. `start` and `end` delimit the addresses of
//! the [placement table](crate::libraries::placement_table). A key is looked up from slot `hash % slots` on, until it
//! or an empty slot is found. A slot is filled once, its state last; an entry that is no longer true is marked as
//! deleted (state 2), and a new one is added. An entry is a hint: if its object has been evicted, there is no file of
//! that name, and the client asks the store.
//!
//! The file is written by pwrite(2), because a write through a mapping cannot report that the disk is full.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

const MAGIC: u64 = u64::from_le_bytes(*b"ORCINDX1");
/// How many slots there are at first; half of them are used at most.
const SLOTS: u64 = 4096;
/// The most slots of an index that has grown, of 256 bytes each.
const MAX_SLOTS: u64 = 1 << 17;
/// The size of the header.
const HEAD: usize = 512;
/// Where the path of the objects' directory begins.
const BASE: usize = 32;
const KEY_WORDS: usize = 8;
const VALUE_WORDS: usize = 3;
/// The longest name, with its final zero byte.
const NAME: usize = 160;
const SLOT: usize = 8 * (1 + KEY_WORDS + VALUE_WORDS) + NAME;
const FULL: u64 = 1;
const DELETED: u64 = 2;

/// The key of an entry.
pub(crate) type Key = [u64; KEY_WORDS];

/// A flag of a file, beside [`EXECUTABLE`](orrery_orc_wire::protocol::EXECUTABLE): its object has all that the dynamic
/// loader maps.
pub(crate) const LOADABLE: u64 = 2;
/// A flag of a file: it has too few relocated data for an address of its own.
pub(crate) const UNPLACED: u64 = 4;

/// The kind of key of a file.
pub(crate) const FILE: u64 = 1;
/// The kind of key of a library's address.
pub(crate) const PLACEMENT: u64 = 2;
/// The kind of key of a library's relocated data.
pub(crate) const RELOCATED: u64 = 3;
/// The kind of key of a library's prelinked data.
pub(crate) const PRELINKED: u64 = 4;

/// The index of one trust domain.
#[derive(Debug)]
pub(crate) struct Index {
    file: OwnedFd,
    slots: u64,
    used: u64,
}

fn hash(key: &Key) -> u64 {
    key.iter().fold(1, |hash, word| {
        let hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash ^ hash >> 29
    })
}

fn place(slot: u64) -> u64 {
    HEAD as u64 + slot * SLOT as u64
}

impl Index {
    /// Creates an index, in place of the file at that path. `base` is the directory of the objects, if it is not that
    /// of the index.
    ///
    /// # Errors
    /// Those of creating a file; `InvalidInput` if the path of `base` is too long.
    pub(crate) fn create(path: &Path, base: Option<&Path>, span: (u64, u64)) -> io::Result<Self> {
        Self::create_with(SLOTS, path, base, span)
    }

    /// Returns an index in place of this one, with the same entries and room for as many more. If there would be too
    /// many, it begins empty: most entries are of files that have gone then, and the others are inserted when they are
    /// asked for again.
    ///
    /// # Errors
    /// As for [`create`](Self::create).
    pub(crate) fn grow(&self, path: &Path, base: Option<&Path>, span: (u64, u64)) -> io::Result<Self> {
        let mut live = Vec::new();
        for slot in 0..self.slots {
            let bytes = self.read(slot)?;
            if bytes[..8] == FULL.to_le_bytes() {
                live.push(bytes);
            }
        }
        let slots = (live.len() as u64 * 4).next_power_of_two().max(SLOTS);
        if slots > MAX_SLOTS {
            return Self::create(path, base, span);
        }
        let mut grown = Self::create_with(slots, path, base, span)?;
        for bytes in &live {
            let mut words = bytes.as_chunks::<8>().0.iter().skip(1).map(|word| u64::from_le_bytes(*word));
            let key = std::array::from_fn(|_| words.next().unwrap_or(0));
            let value = std::array::from_fn(|_| words.next().unwrap_or(0));
            let name = bytes[SLOT - NAME..].split(|byte| *byte == 0).next().unwrap_or_default();
            grown.insert(&key, value, name)?;
        }
        Ok(grown)
    }

    fn create_with(slots: u64, path: &Path, base: Option<&Path>, span: (u64, u64)) -> io::Result<Self> {
        let base = base.map_or(OsStr::new(""), Path::as_os_str).as_bytes();
        if base.len() >= HEAD - BASE {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path of the directory is too long"));
        }
        let mut head = vec![0; HEAD];
        for (place, word) in head.as_chunks_mut::<8>().0.iter_mut().zip([MAGIC, slots, span.0, span.1]) {
            *place = word.to_le_bytes();
        }
        head[BASE..BASE + base.len()].copy_from_slice(base);
        let draft = path.with_extension("new");
        let _ = std::fs::remove_file(&draft);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = rustix::fs::open(&draft, flags, Mode::from_raw_mode(0o444))?;
        // The umask may have cleared bits.
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o444))?;
        rustix::fs::ftruncate(&file, place(slots))?;
        write(&file, &head, 0)?;
        rustix::fs::rename(&draft, path)?;
        Ok(Self { file, slots, used: 0 })
    }

    /// Opens the index of a former store, if it has the same directory of objects.
    ///
    /// # Errors
    /// If there is none.
    pub(crate) fn open(path: &Path, base: Option<&Path>) -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(path, flags, Mode::empty())?;
        let mut index = Self { file, slots: 0, used: 0 };
        let mut head = [0; HEAD];
        let is_whole = rustix::io::pread(&index.file, &mut head, 0)? == HEAD;
        let directory = head[BASE..].split(|byte| *byte == 0).next().unwrap_or_default();
        let wanted = base.map_or(OsStr::new(""), Path::as_os_str).as_bytes();
        if !is_whole || head[..8] != MAGIC.to_le_bytes() || directory != wanted {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut slots = [0; 8];
        slots.copy_from_slice(&head[8..16]);
        index.slots = u64::from_le_bytes(slots);
        if !(SLOTS..=MAX_SLOTS).contains(&index.slots) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        for slot in 0..index.slots {
            index.used += u64::from(index.state(slot)? != 0);
        }
        Ok(index)
    }

    fn state(&self, slot: u64) -> io::Result<u64> {
        let mut word = [0; 8];
        rustix::io::pread(&self.file, &mut word, place(slot))?;
        Ok(u64::from_le_bytes(word))
    }

    fn read(&self, slot: u64) -> io::Result<[u8; SLOT]> {
        let mut bytes = [0; SLOT];
        rustix::io::pread(&self.file, &mut bytes, place(slot))?;
        Ok(bytes)
    }

    /// Inserts an entry in place of the one with the same key.
    ///
    /// # Errors
    /// `StorageFull` if there is no slot left; `InvalidInput` if the name is too long; those of pwrite(2).
    pub(crate) fn insert(&mut self, key: &Key, value: [u64; VALUE_WORDS], name: &[u8]) -> io::Result<()> {
        if name.len() >= NAME {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut bytes = [0; SLOT];
        for (place, word) in
            bytes.as_chunks_mut::<8>().0.iter_mut().skip(1).zip(key.iter().chain(value.iter()))
        {
            *place = word.to_le_bytes();
        }
        bytes[SLOT - NAME..][..name.len()].copy_from_slice(name);
        let first = hash(key);
        for slot in (0..self.slots).map(|step| first.wrapping_add(step) % self.slots) {
            match self.state(slot)? {
                0 => {
                    if self.used >= self.slots / 2 {
                        return Err(io::ErrorKind::StorageFull.into());
                    }
                    self.used += 1;
                    write(&self.file, &bytes[8..], place(slot) + 8)?;
                    return write(&self.file, &FULL.to_le_bytes(), place(slot));
                }
                FULL => {
                    let there = self.read(slot)?;
                    if there[8..] == bytes[8..] {
                        return Ok(());
                    }
                    if there[8..8 + 8 * KEY_WORDS] == bytes[8..8 + 8 * KEY_WORDS] {
                        write(&self.file, &DELETED.to_le_bytes(), place(slot))?;
                    }
                }
                _ => {}
            }
        }
        Err(io::ErrorKind::StorageFull.into())
    }
}

fn write(file: &OwnedFd, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = rustix::io::retry_on_intr(|| rustix::io::pwrite(file, bytes, offset))?;
        if count == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        bytes = &bytes[count..];
        offset += count as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks a key up as `auditor/c/names.c` does.
    fn find(index: &Index, key: &Key) -> Option<(u64, String)> {
        let wanted: Vec<u8> = key.iter().flat_map(|word| word.to_le_bytes()).collect();
        for slot in (0..index.slots).map(|step| hash(key).wrapping_add(step) % index.slots) {
            let bytes = index.read(slot).unwrap();
            match index.state(slot).unwrap() {
                0 => return None,
                FULL if bytes[8..8 + 8 * KEY_WORDS] == wanted[..] => {
                    let value = u64::from_le_bytes(bytes[72..80].try_into().unwrap());
                    let name = bytes[SLOT - NAME..].split(|byte| *byte == 0).next().unwrap();
                    return Some((value, String::from_utf8(name.to_vec()).unwrap()));
                }
                _ => {}
            }
        }
        None
    }

    #[test]
    fn entries_are_found_and_may_change() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("index");
        let mut index = Index::create(&path, None, (1, 2)).unwrap();
        let key = |number: u64| [FILE, number, 0, 0, 0, 0, 0, 0];
        for number in 0..50 {
            index.insert(&key(number), [number, 0, 0], format!("name {number}").as_bytes()).unwrap();
        }
        index.insert(&key(7), [7, 0, 0], b"name 7").unwrap();
        assert_eq!(index.used, 50, "an equal entry takes no slot");
        index.insert(&key(7), [8, 0, 0], b"another").unwrap();
        let mut again = Index::open(&path, None).unwrap();
        assert!(Index::open(&path, Some(Path::new("/elsewhere"))).is_err(), "its objects lie here");
        assert_eq!(again.used, 51);
        again.insert(&key(60), [1, 0, 0], b"later").unwrap();
        assert_eq!(find(&index, &key(7)), Some((8, "another".to_owned())));
        assert_eq!(find(&index, &key(49)), Some((49, "name 49".to_owned())));
        assert_eq!(find(&index, &key(60)), Some((1, "later".to_owned())));
        assert_eq!(find(&index, &key(61)), None);
        assert_eq!(
            index.insert(&key(62), [0; 3], &[b'x'; NAME]).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }

    #[test]
    fn an_index_that_is_full_grows_and_keeps_its_entries() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("index");
        let mut index = Index::create(&path, None, (1, 2)).unwrap();
        let key = |number: u64| [FILE, number, 0, 0, 0, 0, 0, 0];
        for number in 0..SLOTS {
            let name = format!("name {number}");
            if index.insert(&key(number), [number, 0, 0], name.as_bytes()).is_err() {
                index = index.grow(&path, None, (1, 2)).unwrap();
                index.insert(&key(number), [number, 0, 0], name.as_bytes()).unwrap();
            }
        }
        assert_eq!(index.slots, 2 * SLOTS);
        let again = Index::open(&path, None).unwrap();
        assert_eq!((again.slots, again.used), (index.slots, SLOTS));
        for number in 0..SLOTS {
            assert_eq!(find(&again, &key(number)), Some((number, format!("name {number}"))));
        }
    }

    #[test]
    fn a_full_index_refuses_entries_and_garbage_is_no_index() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("index");
        let mut index = Index::create(&path, Some(Path::new("/somewhere")), (1, 2)).unwrap();
        index.used = SLOTS / 2;
        let refused = index.insert(&[1; KEY_WORDS], [0; 3], b"").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        std::fs::remove_file(&path).unwrap();
        assert!(Index::open(&path, None).is_err());
        std::fs::write(&path, vec![7; HEAD]).unwrap();
        assert_eq!(Index::open(&path, None).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let long = "x".repeat(HEAD);
        assert!(Index::create(&path, Some(Path::new(&long)), (0, 0)).is_err());
    }
}
