//! What the processor of a guest lacks.
//!
//! A guest's processor has what every x86-64 has (`qemu64` of QEMU), so that there are no larger registers to carry over. Programs that
//! choose their code by the processor, as most libraries do, choose again when they are started in a guest. What was built for a
//! higher level says so in a note, if its linker was asked to (`-z x86-64-v2`); the dynamic loader refuses it in a guest. Source: System V
//! ABI for x86-64, `GNU_PROPERTY_X86_ISA_1_NEEDED`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;

use object::elf::{
    FileHeader64, GNU_PROPERTY_X86_ISA_1_NEEDED, GNU_PROPERTY_X86_ISA_1_V2, GNU_PROPERTY_X86_ISA_1_V3,
    GNU_PROPERTY_X86_ISA_1_V4,
};
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use object::{Endianness, ReadCache, ReadRef};

use crate::process::Process;
use crate::report::{Findings, Verdict};

/// Features that programs use and guests lack, as `/proc/cpuinfo` names them.
const FEATURES: [&str; 15] = [
    "ssse3",
    "sse4_1",
    "sse4_2",
    "popcnt",
    "movbe",
    "aes",
    "pclmulqdq",
    "rdrand",
    "f16c",
    "fma",
    "avx",
    "bmi1",
    "bmi2",
    "avx2",
    "avx512f",
];

/// Returns what this machine's processor has of [`FEATURES`].
pub(crate) fn beyond_guests() -> Vec<String> {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags")).unwrap_or_default();
    let has: BTreeSet<&str> = flags.split_ascii_whitespace().collect();
    FEATURES.into_iter().filter(|feature| has.contains(feature)).map(str::to_owned).collect()
}

/// Checks the files whose code the processes have mapped.
pub(crate) fn check(processes: &[Process], findings: &mut Findings) {
    for process in processes.iter().filter(|process| !process.has_ended()) {
        let maps = process.text("maps");
        let files: BTreeSet<&str> = maps
            .lines()
            .filter(|line| line.split_ascii_whitespace().nth(1).is_some_and(|rights| rights.contains('x')))
            .filter_map(|line| line.find('/').map(|at| &line[at..]))
            .collect();
        for name in files {
            // By the process' own root directory.
            let path = process.path("root").join(name.trim_start_matches('/'));
            if let Some(level) = level_of(&path).filter(|level| *level > 1) {
                findings.add(
                    process.pid,
                    format!("code of {name}"),
                    Verdict::Refused,
                    format!(
                        "it needs a processor of level x86-64-v{level}, and guests have one of x86-64-v1"
                    ),
                    "use a build for every x86-64",
                );
            }
        }
    }
}

/// Returns the level of processors (1 to 4) that a file says it needs.
fn level_of(path: &Path) -> Option<u32> {
    let cache = ReadCache::new(File::open(path).ok()?);
    needed(&cache)
}

fn needed<'data, R: ReadRef<'data>>(data: R) -> Option<u32> {
    let header = FileHeader64::<Endianness>::parse(data).ok()?;
    let endian = header.endian().ok()?;
    let mut level = None;
    for segment in header.program_headers(endian, data).ok()? {
        let Ok(Some(mut notes)) = segment.notes(endian, data) else { continue };
        while let Ok(Some(note)) = notes.next() {
            let Some(mut properties) = note.gnu_properties(endian) else { continue };
            while let Ok(Some(property)) = properties.next() {
                if property.pr_type() == GNU_PROPERTY_X86_ISA_1_NEEDED {
                    let bits = property.data_u32(endian).ok()?;
                    let levels = [
                        (GNU_PROPERTY_X86_ISA_1_V4, 4),
                        (GNU_PROPERTY_X86_ISA_1_V3, 3),
                        (GNU_PROPERTY_X86_ISA_1_V2, 2),
                    ];
                    level =
                        Some(levels.iter().find(|(bit, _)| bits & bit != 0).map_or(1, |(_, level)| *level));
                }
            }
        }
    }
    level
}
