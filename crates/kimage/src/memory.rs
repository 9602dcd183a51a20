//! Physical memory, wherever it is: the trait that all walkers read through, and the source for memory that is one
//! file, which covers a hypervisor's memory file, a dump of it, and a PCI device's BAR in the guest next door.
//!
//! A hypervisor leaves holes for devices in the physical address space, so that a file's offset is not the physical
//! address: what does not fit below the hole goes on at 4 GiB. [`Layout`] knows where the holes of QEMU's machines are.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::{MmapOptions, MmapRaw};

use crate::error::{Error, Result};

const GIB: u64 = 1 << 30;

/// A run of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its first physical address.
    pub physical: u64,
    /// The size of the segment in bytes.
    pub length: u64,
    /// Where it begins in the source that holds it.
    pub offset: u64,
}

/// A machine's physical memory.
///
/// The machine may be running: what is read is then what stands there at that moment, and two reads may differ.
pub trait PhysicalMemory: Send + Sync {
    /// The runs of memory that exist, by ascending address, without overlaps.
    fn segments(&self) -> &[Segment];

    /// Fills `into` with the memory from address `physical` on.
    ///
    /// # Errors
    ///
    /// [`Error::NoMemory`] with the first address that is missing; `into` may then be filled in part.
    fn read(&self, physical: u64, into: &mut [u8]) -> Result<()>;

    /// Returns where `length` bytes from address `physical` on are in this process' own address space, for system
    /// calls that copy from there; nothing where they are not all there, or this source has no such place. They stay
    /// there as long as the source does, and the owner of the memory may change them.
    fn place(&self, _physical: u64, _length: usize) -> Option<*const u8> {
        None
    }

    /// Returns the kernel's VMCOREINFO, where the program that dumped the memory kept it beside the memory itself.
    fn vmcoreinfo(&self) -> Option<&[u8]> {
        None
    }
}

/// How a file of memory is laid out in the physical address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Offset and physical address are the same.
    Linear,
    /// QEMU's `q35` machine: from 2.75 GiB on, what exceeds 2 GiB is from 4 GiB on.
    Q35,
    /// QEMU's `pc` machine: from 3.5 GiB on, what exceeds 3 GiB is from 4 GiB on.
    Pc,
}

impl Layout {
    /// Returns the segments of a memory of `size` bytes.
    #[must_use]
    pub fn segments(self, size: u64) -> Vec<Segment> {
        let (threshold, below) = match self {
            Self::Linear => (u64::MAX, 0),
            Self::Q35 => (0xb000_0000, 2 * GIB),
            Self::Pc => (0xe000_0000, 3 * GIB),
        };
        if size < threshold {
            return vec![Segment { physical: 0, length: size, offset: 0 }];
        }
        vec![
            Segment { physical: 0, length: below, offset: 0 },
            Segment { physical: 4 * GIB, length: size - below, offset: below },
        ]
    }
}

/// Memory that is mapped from a file.
pub struct MappedMemory {
    map: MmapRaw,
    segments: Vec<Segment>,
    vmcoreinfo: Option<Vec<u8>>,
}

impl MappedMemory {
    /// Opens a file that holds memory and nothing else, such as QEMU's `memory-backend-file` or, in a guest, the
    /// `resource2` of an `ivshmem-plain` device.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where it cannot be mapped, [`Error::NotAnImage`] where it is empty.
    pub fn open(path: &Path, layout: Layout) -> Result<Self> {
        let map = map(path)?;
        let segments = layout.segments(map.len() as u64);
        Ok(Self { map, segments, vmcoreinfo: None })
    }

    /// Memory whose segments are at given places of a file that is already mapped; places outside it, and addresses
    /// that no processor has, are cut off.
    pub(crate) fn with_segments(map: MmapRaw, mut segments: Vec<Segment>) -> Self {
        let end = map.len() as u64;
        for segment in &mut segments {
            segment.offset = segment.offset.min(end);
            let most = (end - segment.offset).min(ADDRESSES.saturating_sub(segment.physical));
            segment.length = segment.length.min(most);
        }
        segments.retain(|segment| segment.length > 0);
        segments.sort_by_key(|segment| segment.physical);
        segments.dedup_by(|next, kept| {
            // Where two overlap, the lower one is believed.
            let end = kept.physical + kept.length;
            if next.physical < end {
                let cut = (end - next.physical).min(next.length);
                next.physical += cut;
                next.offset += cut;
                next.length -= cut;
            }
            next.length == 0
        });
        Self { map, segments, vmcoreinfo: None }
    }

    /// Returns the same memory, with the kernel's VMCOREINFO beside it.
    pub(crate) fn with_vmcoreinfo(self, vmcoreinfo: Option<Vec<u8>>) -> Self {
        Self { vmcoreinfo, ..self }
    }
}

/// How many physical addresses there are (Intel SDM, volume 3, 4.1.4: MAXPHYADDR is 52 at most).
const ADDRESSES: u64 = 1 << 52;

/// Maps a whole file for reading.
pub(crate) fn map(path: &Path) -> Result<MmapRaw> {
    let failed = |operation| move |error: io::Error| Error::File { operation, path: path.to_owned(), error };
    let file = File::open(path).map_err(failed("open"))?;
    let length = file.metadata().map_err(failed("ask for the size of"))?.len();
    let Ok(length) = usize::try_from(length) else {
        return Err(Error::NotAnImage {
            path: path.to_owned(),
            why: format!("{length} bytes cannot be mapped"),
        });
    };
    if length == 0 {
        return Err(Error::NotAnImage { path: path.to_owned(), why: "it is empty".to_owned() });
    }
    MmapOptions::new().len(length).map_raw_read_only(&file).map_err(failed("map"))
}

impl PhysicalMemory for MappedMemory {
    fn segments(&self) -> &[Segment] {
        &self.segments
    }

    fn vmcoreinfo(&self) -> Option<&[u8]> {
        self.vmcoreinfo.as_deref()
    }

    fn place(&self, physical: u64, length: usize) -> Option<*const u8> {
        let index = self.segments.partition_point(|segment| segment.physical <= physical);
        let segment = self.segments.get(index.checked_sub(1)?)?;
        let within = physical - segment.physical;
        let room = segment.length.checked_sub(within)?;
        if u64::try_from(length).ok()? > room {
            return None;
        }
        // The segments were cut to be within the mapping.
        Some(self.map.as_ptr().wrapping_add(usize::try_from(segment.offset + within).ok()?))
    }

    fn read(&self, physical: u64, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            let at = physical.checked_add(done as u64).ok_or(Error::NoMemory { physical })?;
            let missing = Error::NoMemory { physical: at };
            let index = self.segments.partition_point(|segment| segment.physical <= at);
            let Some(segment) = index.checked_sub(1).map(|index| self.segments[index]) else {
                return Err(missing);
            };
            let within = at - segment.physical;
            if within >= segment.length {
                return Err(missing);
            }
            let (Ok(offset), Ok(room)) =
                (usize::try_from(segment.offset + within), usize::try_from(segment.length - within))
            else {
                return Err(missing);
            };
            let count = room.min(into.len() - done);
            // SAFETY: the segments were cut to be within the mapping, so `offset + count` is too, and `into` has
            // room for `count` bytes more. The source is only ever used as a raw pointer, because a running machine
            // may write it meanwhile; all bytes that result are valid ones.
            unsafe {
                self.map.as_ptr().add(offset).copy_to_nonoverlapping(into[done..].as_mut_ptr(), count);
            }
            done += count;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(length: usize) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..length).map(|i| u8::try_from(i % 251).unwrap()).collect();
        std::fs::write(file.path(), bytes).unwrap();
        file
    }

    #[test]
    fn memory_above_the_hole_goes_on_at_four_gib() {
        assert_eq!(Layout::Q35.segments(2 * GIB).len(), 1);
        let segments = Layout::Q35.segments(3 * GIB);
        assert_eq!(segments[1], Segment { physical: 4 * GIB, length: GIB, offset: 2 * GIB });
        assert_eq!(Layout::Pc.segments(3 * GIB).len(), 1);
        assert_eq!(Layout::Pc.segments(4 * GIB)[1].offset, 3 * GIB);
        assert_eq!(Layout::Linear.segments(64 * GIB).len(), 1);
    }

    #[test]
    fn reads_go_over_the_joint_of_two_segments_and_stop_at_a_hole() {
        let file = pattern(8192);
        let segments = vec![
            Segment { physical: 0x3000, length: 100, offset: 0x500 },
            Segment { physical: 0x1000, length: 0x2000, offset: 0 },
        ];
        let memory = MappedMemory::with_segments(map(file.path()).unwrap(), segments);
        let mut bytes = [0; 4];
        memory.read(0x2ffe, &mut bytes).unwrap();
        assert_eq!(
            bytes,
            [0x1ffe % 251, 0x1fff % 251, 0x500 % 251, 0x501 % 251].map(|v| u8::try_from(v).unwrap())
        );
        let error = memory.read(0x3062, &mut bytes).unwrap_err();
        assert!(matches!(error, Error::NoMemory { physical: 0x3064 }), "{error}");
        assert!(memory.read(0xfff, &mut bytes).is_err());
        assert!(memory.read(u64::MAX - 1, &mut bytes).is_err());
        let first = memory.place(0x1000, 1).unwrap();
        assert_eq!(memory.place(0x2ffe, 2), Some(first.wrapping_add(0x1ffe)));
        assert_eq!(memory.place(0x3000, 100), Some(first.wrapping_add(0x500)));
        for (physical, length) in [(0x2ffe, 3), (0x3000, 101), (0xfff, 1), (0x3064, 1), (u64::MAX, 1)] {
            assert_eq!(memory.place(physical, length), None, "{physical:#x}, {length}");
        }
    }

    #[test]
    fn segments_that_lie_about_the_file_are_cut() {
        let file = pattern(4096);
        let segments = vec![
            Segment { physical: 0, length: u64::MAX, offset: 4000 },
            Segment { physical: 10, length: 50, offset: 0 },
            Segment { physical: 90, length: 20, offset: 100 },
        ];
        let memory = MappedMemory::with_segments(map(file.path()).unwrap(), segments);
        assert_eq!(memory.segments()[0], Segment { physical: 0, length: 96, offset: 4000 });
        assert_eq!(memory.segments()[1], Segment { physical: 96, length: 14, offset: 106 });
        assert_eq!(memory.segments().len(), 2);
    }

    #[test]
    fn addresses_that_no_processor_has_are_cut() {
        let file = pattern(4096);
        let segments = [(ADDRESSES - 100, 4096), (ADDRESSES, 1), (u64::MAX - 256, 100)]
            .map(|(physical, length)| Segment { physical, length, offset: 0 });
        let memory = MappedMemory::with_segments(map(file.path()).unwrap(), segments.to_vec());
        assert_eq!(memory.segments(), [Segment { physical: ADDRESSES - 100, length: 100, offset: 0 }]);
        // The scan rounds addresses up.
        assert_eq!(crate::Vmcoreinfo::scan(&memory), []);
    }

    #[test]
    fn an_empty_file_is_no_image() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(MappedMemory::open(file.path(), Layout::Linear), Err(Error::NotAnImage { .. })));
    }
}
