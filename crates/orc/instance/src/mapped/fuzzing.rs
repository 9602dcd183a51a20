//! A library made by hand, for tests and fuzz targets.

use object::elf;
use orrery_sys::PAGE;

use crate::mapped::plan::Plan;
use crate::mapped::relocations::Value;

/// Where the writable segment begins: in the file, and in memory.
const DATA: u64 = 0x1000;
pub(crate) const WORDS: u64 = 0x1800;
pub(crate) const CODE: u64 = 0x500;

/// Reads bytes as a library to be mapped.
///
/// # Panics
/// Where mapping or relocating it as was read would write to what is not the library's.
pub fn mapped_library(input: &[u8]) {
    let Ok(plan) = Plan::read(input) else { return };
    let segments = &plan.segments;
    assert!(
        segments.span.start.is_multiple_of(PAGE) && segments.span.end.is_multiple_of(PAGE),
        "{segments:?}"
    );
    let mut last = segments.span.start;
    for load in &segments.loads {
        assert!(load.start.is_multiple_of(PAGE) && load.offset.is_multiple_of(PAGE as u64), "{load:?}");
        assert!(last <= load.start && load.start <= load.file_end && load.file_end <= load.end, "{load:?}");
        assert!(load.offset + (load.file_end - load.start) as u64 <= input.len() as u64, "{load:?}");
        assert!(!(load.write && load.execute) && (load.write || load.file_end == load.end), "{load:?}");
        last = load.end;
    }
    assert!(last <= segments.span.end, "{segments:?}");
    for relocation in &plan.relocations {
        let len = if matches!(relocation.value, Value::Descriptor { .. }) { 16 } else { 8 };
        let within = |load: &&crate::mapped::segments::Segment| {
            load.write && load.start <= relocation.at && relocation.at + len <= load.end
        };
        assert!(segments.loads.iter().any(|load| within(&load)), "{relocation:?}");
        match relocation.value {
            Value::Import { import, .. } | Value::BlockOf { import } | Value::OffsetOf { import, .. } => {
                assert!(import < plan.imports.len(), "{relocation:?}");
            }
            Value::Resolved { function, .. } => assert!(segments.is_code(function), "{relocation:?}"),
            Value::Block | Value::Descriptor { .. } => assert!(segments.thread_local.is_some()),
            Value::Base(_) | Value::Same(_) => {}
        }
    }
    assert!(segments.relro.is_empty() || segments.is_writable(&segments.relro), "{segments:?}");
}

/// Returns libraries with something of everything that is read: with one hash table, and with the other.
#[must_use]
pub fn mapped_libraries() -> Vec<Vec<u8>> {
    vec![library(true), library(false)]
}

fn put<const N: usize>(bytes: &mut [u8], at: u64, words: [u64; N]) {
    for (word, number) in bytes[usize::try_from(at).unwrap_or_default()..].chunks_exact_mut(8).zip(words) {
        word.copy_from_slice(&number.to_le_bytes());
    }
}

fn put_half<const N: usize>(bytes: &mut [u8], at: usize, words: [u32; N]) {
    for (word, number) in bytes[at..].chunks_exact_mut(4).zip(words) {
        word.copy_from_slice(&number.to_le_bytes());
    }
}

/// Two numbers of 32 bits in a word.
const fn two(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

pub(crate) fn library(gnu: bool) -> Vec<u8> {
    let mut bytes = vec![0; 0x2000];
    bytes[..8].copy_from_slice(b"\x7fELF\x02\x01\x01\0");
    put(&mut bytes, 16, [two(3 | 62 << 16, 1), 0, 64, 0, two(0, 64 | 56 << 16), 6]);
    let headers: [(u32, u32, u64, u64, u64, u64); 6] = [
        (elf::PT_LOAD, elf::PF_R | elf::PF_X, 0, DATA, DATA, 0x1000),
        (elf::PT_LOAD, elf::PF_R | elf::PF_W, DATA, 0x1000, 0x3000, 0x1000),
        (elf::PT_DYNAMIC, elf::PF_R | elf::PF_W, DATA, 0x200, 0x200, 8),
        (elf::PT_TLS, elf::PF_R, 0x18c0, 16, 32, 16),
        (elf::PT_GNU_RELRO, elf::PF_R, DATA, 0x1000, 0x1000, 1),
        (elf::PT_GNU_EH_FRAME, elf::PF_R, 0x540, 16, 16, 4),
    ];
    for (at, (kind, flags, address, in_file, in_memory, align)) in (64..).step_by(56).zip(headers) {
        put(&mut bytes, at, [two(kind, flags), address, address, address, in_file, in_memory, align]);
    }
    // Symbols: a function, an import with a version, a thread-local variable, a number.
    let (global, weak) = (u32::from(elf::STB_GLOBAL) << 4, u32::from(elf::STB_WEAK) << 4);
    let (function, variable) = (u32::from(elf::STT_FUNC), u32::from(elf::STT_TLS));
    put(&mut bytes, 0x218, [two(1, global | function | 1 << 16), CODE, 1]);
    put(&mut bytes, 0x230, [two(6, weak | function), 0, 0]);
    put(&mut bytes, 0x248, [two(11, global | variable | 2 << 16), 8, 8]);
    put(&mut bytes, 0x260, [two(17, global | 0xfff1 << 16), 7, 0]);
    let names = b"\0next\0puts\0local\0seven\0libc.so.6\0GLIBC_2.2.5\0$ORIGIN\0";
    bytes[0x300..][..names.len()].copy_from_slice(names);
    for (at, version) in [0_u8, 1, 2, 1, 1].into_iter().enumerate() {
        bytes[0x380 + 2 * at] = version;
    }
    put_half(&mut bytes, 0x3a0, [1 | 1 << 16, 23, 16, 0, 0x0969_1a75, 2 << 16, 33, 0]);
    if gnu {
        put_half(&mut bytes, 0x400, [1, 1, 1, 6, 0, 0, 1, 2, 4, 6, 9]);
    } else {
        put_half(&mut bytes, 0x400, [1, 5, 1, 0, 2, 3, 4, 0]);
    }
    // Relocations of each type that is served.
    let entries: [(u32, u32, u64); 8] = [
        (elf::R_X86_64_RELATIVE, 0, CODE),
        (elf::R_X86_64_IRELATIVE, 0, CODE),
        (elf::R_X86_64_64, 1, 4),
        (elf::R_X86_64_GLOB_DAT, 2, 0),
        (elf::R_X86_64_DTPMOD64, 0, 0),
        (elf::R_X86_64_DTPOFF64, 3, 0),
        (elf::R_X86_64_64, 4, 1),
        (elf::R_X86_64_TLSDESC, 3, 0),
    ];
    for (number, (kind, symbol, addend)) in (0..).zip(entries) {
        put(&mut bytes, 0x600 + 24 * number, [WORDS + 8 * number, two(kind, symbol), addend]);
    }
    put(&mut bytes, WORDS + 0x50, [0x123]);
    put(&mut bytes, 0x520, [WORDS + 0x50, 0b11]);
    bytes[0x500] = 0xc3;
    put_half(&mut bytes, 0x540, [0x3b03_1b01, 0x0c]);
    // A CIE with a personality, and the end.
    put_half(&mut bytes, 0x550, [12, 0]);
    bytes[0x558..][..6].copy_from_slice(b"\x01zPLR\0");
    let hash = if gnu { elf::DT_GNU_HASH } else { elf::DT_HASH };
    let tags: [(u32, u64); 21] = [
        (elf::DT_NEEDED, 23),
        (elf::DT_RUNPATH, 45),
        (elf::DT_STRTAB, 0x300),
        (elf::DT_STRSZ, names.len() as u64),
        (elf::DT_SYMTAB, 0x200),
        (hash, 0x400),
        (elf::DT_VERSYM, 0x380),
        (elf::DT_VERNEED, 0x3a0),
        (elf::DT_VERNEEDNUM, 1),
        (elf::DT_RELA, 0x600),
        (elf::DT_RELASZ, 7 * 24),
        (elf::DT_JMPREL, 0x600 + 7 * 24),
        (elf::DT_PLTRELSZ, 24),
        (super::dynamic::DT_RELR, 0x520),
        (super::dynamic::DT_RELRSZ, 16),
        (elf::DT_INIT, CODE),
        (elf::DT_FINI, CODE),
        (elf::DT_INIT_ARRAY, 0x1900),
        (elf::DT_INIT_ARRAYSZ, 8),
        (elf::DT_FINI_ARRAY, 0x1908),
        (elf::DT_FINI_ARRAYSZ, 8),
    ];
    for (at, (tag, value)) in (DATA..).step_by(16).zip(tags) {
        put(&mut bytes, at, [u64::from(tag), value]);
    }
    bytes
}
