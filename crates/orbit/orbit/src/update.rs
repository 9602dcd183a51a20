//! Updates: what a task wants main to know or to change.
//!
//! A task fills a [`Scratch`] and sends it ([`crate::send`]). Main gets an [`Update`]: a list of records that it may
//! read, apply or leave, one by one or all. Before main sees any of it every record was checked: the lengths add up,
//! what is to be modified is in memory that areas use now (or in a range that [`crate::Builder::allow`] named), and
//! what is to be called is code of the program. If one record is bad, the update is refused whole.
//!
//! On the wire a record is a head of four words (kind, length, address) and its bytes, padded to eight.

use core::ffi::c_void;
use core::ops::Range;

use orrery_memory::area::Area;

use crate::code::Code;

/// A function that an operation calls in main: how many arguments, and the arguments.
pub type Operation = unsafe extern "C" fn(usize, *mut usize) -> usize;

const DATA: u32 = 1;
const MODIFY: u32 = 2;
const OPERATION: u32 = 3;
const HEAD: usize = 16;
/// The most arguments that an operation has.
pub const OPERATION_ARGUMENTS: usize = 64;

/// Records in the making, in the orbit. Sending empties it, so that it can be used again.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    bytes: Vec<u8>,
    records: usize,
}

impl Scratch {
    /// Creates an empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes for main to read.
    pub fn data(&mut self, bytes: &[u8]) -> &mut Self {
        self.record(DATA, 0, bytes)
    }

    /// Adds the wish that main's memory at `target` should hold `bytes`.
    pub fn modify<T>(&mut self, target: *const T, bytes: &[u8]) -> &mut Self {
        self.record(MODIFY, target.expose_provenance(), bytes)
    }

    /// Adds the wish that main should call `function` with `arguments` (at most [`OPERATION_ARGUMENTS`] count).
    pub fn operation(&mut self, function: Operation, arguments: &[usize]) -> &mut Self {
        let words: Vec<u8> = arguments.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.record(OPERATION, function as usize, &words)
    }

    fn record(&mut self, kind: u32, address: usize, bytes: &[u8]) -> &mut Self {
        self.bytes.extend(kind.to_ne_bytes());
        // A record of 4 GiB would be cut here, and refused by main because its parts do not add up.
        self.bytes.extend(u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_ne_bytes());
        self.bytes.extend((address as u64).to_ne_bytes());
        self.bytes.extend(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        self.records += 1;
        self
    }

    /// Returns how many records there are.
    pub fn len(&self) -> usize {
        self.records
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.records == 0
    }

    /// Drops all records.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.records = 0;
    }

    /// Returns the records in their encoded form.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// One record of an update.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Record<'a> {
    /// Bytes for the receiver to read.
    Data(&'a [u8]),
    /// Bytes to put somewhere.
    Modify {
        /// The address of the bytes in main.
        address: usize,
        /// The new bytes.
        bytes: &'a [u8],
    },
    /// A call to make.
    Operation {
        /// The function's address.
        function: usize,
        /// The arguments, as native words.
        arguments: &'a [u8],
    },
}

/// Where updates may write and what they may call.
#[derive(Debug, Default)]
pub(crate) struct Permissions {
    pub(crate) code: Code,
    pub(crate) ranges: Vec<Range<usize>>,
}

impl Permissions {
    fn check(&self, record: Record<'_>) -> Result<(), String> {
        match record {
            Record::Data(_) => Ok(()),
            Record::Modify { address, bytes } => {
                let end = address.checked_add(bytes.len()).ok_or("it would write past the end of memory")?;
                let allowed = self.ranges.iter().any(|range| range.start <= address && end <= range.end);
                let in_area = || {
                    Area::containing(core::ptr::without_provenance::<u8>(address))
                        .is_some_and(|area| area.in_use(address, bytes.len()))
                };
                if allowed || in_area() {
                    Ok(())
                } else {
                    Err(format!("{} bytes at {address:#x} are not in use by any area", bytes.len()))
                }
            }
            Record::Operation { function, arguments } => {
                if !self.code.contains(function) {
                    Err(format!("there is no function at {function:#x}"))
                } else if arguments.len() > OPERATION_ARGUMENTS * size_of::<usize>()
                    || !arguments.len().is_multiple_of(size_of::<usize>())
                {
                    Err(format!("an operation with {} bytes of arguments", arguments.len()))
                } else {
                    Ok(())
                }
            }
        }
    }
}

/// What a task sent, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    call: u64,
    bytes: Vec<u8>,
    records: usize,
}

impl Update {
    /// Checks what arrived for `call`.
    pub(crate) fn check(call: u64, bytes: Vec<u8>, permissions: &Permissions) -> Result<Self, String> {
        let mut rest = bytes.as_slice();
        let mut records = 0;
        while !rest.is_empty() {
            let record = split(&mut rest).ok_or_else(|| format!("record {records} is cut off or unknown"))?;
            permissions.check(record).map_err(|reason| format!("record {records}: {reason}"))?;
            records += 1;
        }
        Ok(Self { call, bytes, records })
    }

    /// Returns the call whose task sent it.
    pub fn call(&self) -> u64 {
        self.call
    }

    /// Returns how many records there are.
    pub fn len(&self) -> usize {
        self.records
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.records == 0
    }

    /// Returns the records, in the order in which they were added.
    pub fn records(&self) -> Records<'_> {
        Records { rest: &self.bytes }
    }

    /// Applies all records in order.
    ///
    /// # Errors
    /// What is wrong with the first record that cannot be applied; then none is.
    ///
    /// # Safety
    /// As for [`Record::apply`], for each of them.
    pub unsafe fn apply(&self) -> Result<(), String> {
        for record in self.records() {
            record.still_applies()?;
        }
        for record in self.records() {
            // SAFETY: what `Record::apply` demands holds for each record (# Safety).
            unsafe { record.apply()? };
        }
        Ok(())
    }
}

impl Record<'_> {
    /// Applies this record: writes the bytes or calls the function; data is left alone. Returns what the function did.
    ///
    /// # Errors
    /// The area is not there any more.
    ///
    /// # Safety
    /// The bytes at the target may be overwritten with these, and no other thread uses them meanwhile; the function may
    /// be called with these arguments. The orbit's word is the only one for that, so the caller should trust it or look
    /// at the record first.
    pub unsafe fn apply(&self) -> Result<usize, String> {
        self.still_applies()?;
        match *self {
            Record::Data(_) => Ok(0),
            Record::Modify { address, bytes } => {
                let target = core::ptr::with_exposed_provenance_mut::<u8>(address);
                // SAFETY: the target was checked to be mapped memory of an area (or allowed by the user); the caller
                // vouches for its contents.
                unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
                Ok(0)
            }
            Record::Operation { function, arguments } => {
                let mut words = [0_usize; OPERATION_ARGUMENTS];
                let count = arguments.len() / size_of::<usize>();
                for (word, bytes) in words.iter_mut().zip(arguments.as_chunks::<{ size_of::<usize>() }>().0) {
                    *word = usize::from_ne_bytes(*bytes);
                }
                let function = core::ptr::with_exposed_provenance::<c_void>(function);
                // SAFETY: the address is in the program's code; the caller vouches that a function of this type is
                // there.
                let function = unsafe { core::mem::transmute::<*const c_void, Operation>(function) };
                // SAFETY: the address is in the program's code; the caller vouches that a function of this
                // type is there.
                Ok(unsafe { function(count, words.as_mut_ptr()) })
            }
        }
    }

    /// Between arrival and application a block may have been freed, or an area.
    fn still_applies(&self) -> Result<(), String> {
        match *self {
            Record::Modify { address, bytes } => {
                let gone = Area::containing(core::ptr::without_provenance::<u8>(address))
                    .is_some_and(|area| !area.in_use(address, bytes.len()));
                if gone {
                    Err(format!("{} bytes at {address:#x} are not in use any more", bytes.len()))
                } else {
                    Ok(())
                }
            }
            _ => Ok(()),
        }
    }
}

/// Iterates over records.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Records<'a> {
    type Item = Record<'a>;

    fn next(&mut self) -> Option<Record<'a>> {
        split(&mut self.rest)
    }
}

/// Splits the first record off.
fn split<'a>(rest: &mut &'a [u8]) -> Option<Record<'a>> {
    let head = rest.first_chunk::<HEAD>()?;
    let kind = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]);
    let len = usize::try_from(u32::from_ne_bytes([head[4], head[5], head[6], head[7]])).ok()?;
    let mut eight = [0; 8];
    eight.copy_from_slice(&head[8..]);
    let address = usize::try_from(u64::from_ne_bytes(eight)).ok()?;
    let bytes = rest.get(HEAD..HEAD + len)?;
    let record = match kind {
        DATA => Record::Data(bytes),
        MODIFY => Record::Modify { address, bytes },
        OPERATION => Record::Operation { function: address, arguments: bytes },
        _ => return None,
    };
    *rest = rest.get((HEAD + len).next_multiple_of(8)..)?;
    Some(record)
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn add(count: usize, arguments: *mut usize) -> usize {
        // SAFETY: `add` is called with `count` arguments that stay for the call.
        unsafe { core::slice::from_raw_parts(arguments, count) }.iter().sum()
    }

    fn permissions(ranges: Vec<Range<usize>>) -> Permissions {
        Permissions { code: Code::of_this_process().unwrap(), ranges }
    }

    fn range_of<T>(value: &T) -> Range<usize> {
        let start = core::ptr::from_ref(value).addr();
        start..start + size_of::<T>()
    }

    #[test]
    fn records_are_read_and_applied() {
        let mut target = 5_u32;
        let mut scratch = Scratch::new();
        scratch.data(b"hello").modify(&raw const target, &9_u32.to_ne_bytes()).operation(add, &[1, 2, 3]);
        let update =
            Update::check(3, scratch.bytes().to_vec(), &permissions(vec![range_of(&target)])).unwrap();
        assert_eq!((update.call(), update.len(), scratch.len()), (3, 3, 3));
        let records: Vec<_> = update.records().collect();
        assert_eq!(records[0], Record::Data(b"hello"));
        target = 6;
        assert_eq!(target, 6);
        // SAFETY: the targets are this test's own.
        unsafe {
            assert_eq!(records[2].apply(), Ok(6));
            update.apply().unwrap();
        }
        assert_eq!(target, 9);
    }

    #[test]
    fn bad_updates_are_refused_whole() {
        let target = 5_u32;
        let allowed = permissions(vec![range_of(&target)]);
        let whole = {
            let mut scratch = Scratch::new();
            scratch.data(b"hello").modify(&raw const target, &[1; 4]).operation(add, &[]);
            scratch.bytes().to_vec()
        };
        assert!(Update::check(0, whole.clone(), &allowed).is_ok());
        for len in 1..whole.len() {
            let cut = Update::check(0, whole[..len].to_vec(), &allowed);
            // A cut at the border of records leaves whole ones.
            assert!(cut.is_err() || [24, 48].contains(&len), "{len}");
        }
        let mut scratch = Scratch::new();
        scratch.modify(&raw const target, &[1; 5]);
        assert!(Update::check(0, scratch.bytes().to_vec(), &allowed).is_err(), "one byte too many");
        for kind in [0_u8, 4, 99] {
            let mut bytes = whole.clone();
            bytes[0] = kind;
            assert!(Update::check(0, bytes, &allowed).is_err());
        }
        let mut bytes = whole.clone();
        let at = whole.len() - 8;
        bytes[at..].copy_from_slice(&8_u64.to_ne_bytes());
        assert!(Update::check(0, bytes, &allowed).unwrap_err().contains("no function at 0x8"));
        let mut scratch = Scratch::new();
        scratch.modify(core::ptr::without_provenance::<u8>(usize::MAX - 2), &[1; 8]);
        assert!(Update::check(0, scratch.bytes().to_vec(), &allowed).is_err());
    }
}
