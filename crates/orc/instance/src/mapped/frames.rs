//! The table of frames, by which exceptions find their way through a library's functions.
//!
//! The dynamic loader's list of libraries, in which unwinders look first (`_dl_find_object`), lacks what this crate maps, and
//! there is no way to add to it. What libgcc offers to compilers that make code at run time is `__register_frame`: it takes
//! the `.eh_frame` of a mapping. Only lengths and augmentations are read here, since the registration reads up to the zero
//! word at the end, and where that is missing, past it.

use crate::mapped::elf::Bytes;

/// A table that ends as it must.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frames {
    /// Where it begins, relative to where the library is mapped.
    pub(crate) start: usize,
    /// Whether functions handle exceptions, or have destructors to run for them.
    pub(crate) handlers: bool,
}

impl Frames {
    /// Returns the table that `.eh_frame_hdr`, at `header`, leads to; none where it is not of the form that linkers give it.
    pub(crate) fn read(header: usize, bytes: Bytes<'_>) -> Option<Self> {
        /// DW_EH_PE_pcrel and DW_EH_PE_sdata4.
        const RELATIVE: u8 = 0x1b;
        let [1, RELATIVE, _, _, distance @ ..] = bytes.from(header)?.first_chunk::<8>()? else { return None };
        let distance = isize::try_from(i32::from_le_bytes(*distance)).ok()?;
        let start = header.checked_add(4)?.checked_add_signed(distance)?;
        let mut handlers = false;
        let mut rest = bytes.from(start)?;
        loop {
            let (len, after) = rest.split_first_chunk::<4>()?;
            let len = match u32::from_le_bytes(*len) {
                0 => return Some(Self { start, handlers }),
                // A length of 64 bits, which libgcc does not read.
                u32::MAX => return None,
                len => len as usize,
            };
            let (record, after) = after.split_at_checked(len)?;
            // A CIE: its number is 0; a version of one byte is before its augmentation, in which 'P' stands for a handler.
            if let [0, 0, 0, 0, _, augmentation @ ..] = record {
                handlers |= augmentation.iter().take_while(|byte| **byte != 0).any(|byte| *byte == b'P');
            }
            rest = after;
        }
    }
}
