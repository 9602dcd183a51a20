//! What is known of a library by its file: all that making an instance needs.

use std::collections::HashMap;
use std::ffi::CString;

use crate::mapped::dynamic::{Dynamic, Table};
use crate::mapped::elf::Result;
use crate::mapped::frames::Frames;
use crate::mapped::relocations::{self, Relocation};
use crate::mapped::segments::Segments;
use crate::mapped::symbols::{Definition, Import, Symbols};

/// A library as its file has it; addresses are relative to where it is mapped.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) segments: Segments,
    pub(crate) relocations: Vec<Relocation>,
    pub(crate) imports: Vec<Import>,
    pub(crate) exports: HashMap<CString, Definition>,
    pub(crate) needed: Vec<CString>,
    pub(crate) search: Option<CString>,
    pub(crate) frames: Option<Frames>,
    pub(crate) init: Option<usize>,
    pub(crate) init_array: Table,
    pub(crate) fini: Option<usize>,
    pub(crate) fini_array: Table,
}

impl Plan {
    /// Reads a library, of which everything is checked on which the safety of mapping and relocating it depends.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self> {
        let (segments, bytes) = Segments::read(bytes)?;
        let dynamic = Dynamic::read(&segments, bytes)?;
        let mut symbols = Symbols::read(&dynamic, bytes)?;
        let relocations = relocations::read(&segments, &dynamic, &mut symbols, bytes)?;
        let exports = symbols.exports()?;
        let frames = segments.frame_header.and_then(|header| Frames::read(header, bytes));
        let Dynamic { needed, search, init, init_array, fini, fini_array, .. } = dynamic;
        let imports = symbols.imports;
        Ok(Self {
            segments,
            relocations,
            imports,
            exports,
            needed,
            search,
            frames,
            init,
            init_array,
            fini,
            fini_array,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapped::elf::Refusal;
    use crate::mapped::fuzzing::{CODE, WORDS, library, mapped_library};
    use crate::mapped::relocations::Value;
    use crate::mapped::segments::ThreadLocal;

    #[test]
    fn a_library_is_read_by_either_hash_table() {
        for bytes in [library(true), library(false)] {
            let plan = Plan::read(&bytes).unwrap();
            let (code, words) = (usize::try_from(CODE).unwrap(), usize::try_from(WORDS).unwrap());
            assert_eq!(plan.segments.span, 0..0x4000);
            assert_eq!(plan.segments.relro, 0x1000..0x2000);
            let block = ThreadLocal { start: 0x18c0, file_len: 16, len: 32, align: 16 };
            assert_eq!(plan.segments.thread_local, Some(block));
            assert_eq!(plan.frames, Some(Frames { start: 0x550, handlers: true }));
            assert_eq!(
                (plan.needed, plan.search),
                (vec![c"libc.so.6".to_owned()], Some(c"$ORIGIN".to_owned()))
            );
            assert_eq!((plan.init, plan.fini), (Some(code), Some(code)));
            assert_eq!(plan.init_array, Table { address: 0x1900, len: 8 });
            assert_eq!(plan.fini_array, Table { address: 0x1908, len: 8 });
            let version = Some(c"GLIBC_2.2.5".to_owned());
            let puts = Import { name: c"puts".to_owned(), version, weak: true, thread_local: false };
            assert_eq!(plan.imports, [puts]);
            let mut exports: Vec<_> = plan.exports.into_iter().collect();
            exports.sort_by(|one, other| one.0.cmp(&other.0));
            let expected = [
                (c"local", Definition::ThreadLocal(8)),
                (c"next", Definition::Address(code)),
                (c"seven", Definition::Absolute(7)),
            ];
            assert_eq!(exports, expected.map(|(name, what)| (name.to_owned(), what)));
            let found: Vec<_> =
                plan.relocations.iter().map(|relocation| (relocation.at - words, relocation.value)).collect();
            let expected = [
                (0x50, Value::Base(0x123)),
                (0x58, Value::Base(0)),
                (0, Value::Base(code)),
                (16, Value::Base(code + 4)),
                (24, Value::Import { import: 0, addend: 0 }),
                (32, Value::Block),
                (40, Value::Same(8)),
                (48, Value::Same(8)),
                (56, Value::Descriptor { offset: 8 }),
                (8, Value::Resolved { function: code, addend: 0 }),
            ];
            assert_eq!(found, expected);
        }
    }

    fn changed(at: u64, word: u64) -> Plan {
        Plan::read(&with(at, word)).unwrap()
    }

    fn refused(at: u64, word: u64) -> Refusal {
        Plan::read(&with(at, word)).unwrap_err()
    }

    fn with(at: u64, word: u64) -> Vec<u8> {
        let mut bytes = library(true);
        bytes[usize::try_from(at).unwrap()..][..8].copy_from_slice(&word.to_le_bytes());
        bytes
    }

    /// The word that has a relocation's type and symbol.
    fn kind(number: u64) -> u64 {
        0x600 + 24 * number + 8
    }

    #[test]
    fn relocations_change_what_is_writable_alone() {
        assert_eq!(refused(0x600, 0x200), Refusal::TextRelocations);
        assert_eq!(refused(0x600, 0xffc), Refusal::TextRelocations);
        assert!(matches!(refused(0x600, 0x4000), Refusal::Malformed(_)));
        // The last word of the variables, and one byte more.
        assert_eq!(changed(0x600, 0x3ff8).relocations.len(), 10);
        assert_eq!(refused(0x600, 0x3ff9), Refusal::TextRelocations);
        // A descriptor has two words.
        assert_eq!(refused(0x600 + 24 * 7, 0x3ff8), Refusal::TextRelocations);
        assert_eq!(refused(0x520, 0x200), Refusal::TextRelocations);
    }

    #[test]
    fn relocations_that_cannot_be_served_are_refused() {
        let symbol = |number: u64, kind: u32| number << 32 | u64::from(kind);
        assert_eq!(refused(kind(0), symbol(3, object::elf::R_X86_64_TPOFF64)), Refusal::InitialExec);
        assert_eq!(
            refused(kind(0), symbol(2, object::elf::R_X86_64_COPY)),
            Refusal::Relocation(object::elf::R_X86_64_COPY)
        );
        // A descriptor of another library's variable.
        let descriptor = object::elf::R_X86_64_TLSDESC;
        assert_eq!(refused(kind(7), symbol(2, descriptor)), Refusal::Relocation(descriptor));
        // A function as a thread-local variable, and a thread-local variable as an address.
        assert!(matches!(refused(kind(5), symbol(1, object::elf::R_X86_64_DTPOFF64)), Refusal::Malformed(_)));
        assert!(matches!(refused(kind(2), symbol(3, object::elf::R_X86_64_64)), Refusal::Malformed(_)));
        // A symbol past all tables, and a resolver that is no code.
        assert!(matches!(refused(kind(2), symbol(1 << 20, object::elf::R_X86_64_64)), Refusal::Malformed(_)));
        assert!(matches!(refused(0x600 + 24 + 16, WORDS), Refusal::Malformed(_)));
    }

    #[test]
    fn a_table_of_frames_has_an_end() {
        // A length that leads past the segment.
        assert_eq!(changed(0x550 + 16, 0xfff0).frames, None);
        // Another encoding of the table's place.
        assert_eq!(changed(0x540, 0x0c_3b03_1a01).frames, None);
        assert_eq!(
            changed(0x558, 0x0000_0000_5200_7a01).frames,
            Some(Frames { start: 0x550, handlers: false })
        );
    }

    proptest::proptest! {
        #[test]
        fn changed_libraries_are_refused_or_safe(changes in proptest::collection::vec((0..0x2000_usize, proptest::num::u8::ANY), 1..8)) {
            let mut bytes = library(changes.len() % 2 == 0);
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            mapped_library(&bytes);
        }
    }
}
