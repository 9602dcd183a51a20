//! The standard streams of a request.
//!
//! To make three text streams takes a good part of what it takes to run a short script. So they are made beforehand,
//! for what descriptors ordinarily are: pipes and the like, and files that are at their beginning. The streams know of
//! their descriptor only its number, its block size, whether it can seek and where it was; a request whose descriptors
//! are alike takes them from the shelf. Any other (a terminal, a file that has been written to already, another
//! encoding) gets streams made for it.

use std::os::fd::BorrowedFd;

use rustix::fs::{FileType, SeekFrom};

use crate::environment::Wishes;
use crate::object::{self, Held, Object, Raised, Result};

/// Streams that wait for a request.
#[derive(Debug)]
struct Prefabricated {
    seekable: bool,
    errors: Vec<u8>,
    unbuffered: bool,
    block_size: i64,
    /// Input, output and error.
    streams: Vec<Object>,
}

/// The shelf.
#[derive(Debug)]
pub(crate) struct Shelf {
    sets: Vec<Prefabricated>,
    /// `open_streams` of the bootstrap.
    make: Object,
}

const NAMES: [[&std::ffi::CStr; 2]; 3] =
    [[c"stdin", c"__stdin__"], [c"stdout", c"__stdout__"], [c"stderr", c"__stderr__"]];

impl Shelf {
    /// Takes over what the bootstrap's `prefabricate` made.
    pub(crate) fn new(made: &Object, make: Object) -> Result<Self> {
        let sets = made.items().into_iter().map(|set| {
            let [seekable, errors, unbuffered, block_size, streams] =
                <[Object; 5]>::try_from(set.parts()?).map_err(|_| Raised)?;
            Ok(Prefabricated {
                seekable: seekable.is_true(),
                errors: errors.encode()?,
                unbuffered: unbuffered.is_true(),
                block_size: block_size.number()?,
                streams: streams.items(),
            })
        });
        Ok(Self { sets: sets.collect::<Result<_>>()?, make })
    }

    /// Sets `sys.stdin` and its like, for the descriptors that are `present`.
    pub(crate) fn open(&self, held: Held, present: u8, wishes: &Wishes<'_>, unbuffered: bool) -> Result<()> {
        let mut chosen: [Option<Object>; 3] = [None, None, None];
        if wishes.encoding.is_none() {
            for (number, place) in chosen.iter_mut().enumerate() {
                if present & (1 << number) != 0 {
                    *place = self.find(number, wishes.errors, unbuffered);
                }
            }
        }
        let missing = (0..3).any(|number| present & (1 << number) != 0 && chosen[number].is_none());
        let made = if missing {
            let made = self.make.call(&[
                &Object::integer(held, present.into())?,
                &Object::decode(held, wishes.encoding.unwrap_or_default())?,
                &Object::decode(held, wishes.errors.as_bytes())?,
                &Object::boolean(held, unbuffered),
            ])?;
            made.items()
        } else {
            Vec::new()
        };
        for (number, names) in NAMES.iter().enumerate() {
            let stream = match (&chosen[number], made.get(number)) {
                (Some(stream), _) | (None, Some(stream)) => stream.clone(),
                (None, None) => Object::none(held),
            };
            for name in names {
                object::set_sys(held, name, &stream)?;
            }
        }
        Ok(())
    }

    /// The stream for descriptor `number`, if there is one that fits.
    fn find(&self, number: usize, errors: &str, unbuffered: bool) -> Option<Object> {
        let fd = i32::try_from(number).ok()?;
        // SAFETY: one of the standard descriptors, which nothing in this program closes while a request begins.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let stat = rustix::fs::fstat(fd).ok()?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Directory || kind == FileType::CharacterDevice && rustix::termios::isatty(fd) {
            return None;
        }
        let seekable = match rustix::fs::seek(fd, SeekFrom::Current(0)) {
            Ok(0) => true,
            Ok(_) => return None,
            Err(_) => false,
        };
        let fits = |set: &&Prefabricated| {
            set.seekable == seekable
                && set.unbuffered == unbuffered
                && set.errors == errors.as_bytes()
                && set.block_size == stat.st_blksize
        };
        self.sets.iter().find(fits)?.streams.get(number).cloned()
    }
}
