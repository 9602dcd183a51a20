//! Files, and what lies in memory.

use std::ffi::OsString;
use std::fs;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use orrery_kimage::{Kernel, Layout, PhysicalMemory as _, open_memory};
use rustix::fs::{MemfdFlags, memfd_create};

/// `/proc/PID/maps`: the names of files are whatever a program chose.
pub(super) fn maps(input: &[u8]) {
    for entry in orrery_sys::maps::entries(input) {
        if let Some(last) = entry.range.end.checked_sub(1).filter(|last| *last >= entry.range.start) {
            let _offset = entry.offset_of(last);
        }
    }
}

/// Memory of a machine: an ELF core, or plain memory, with a kernel in it or not.
pub(super) fn kernel_image(input: &[u8]) {
    let Ok(file) = memfd_create("image", MemfdFlags::CLOEXEC) else { return };
    if rustix::io::write(&file, input) != Ok(input.len()) {
        return;
    }
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let Ok(memory) = open_memory(&path, Layout::Linear) else { return };
    let mut bytes = [0; 64];
    for segment in memory.segments().to_vec() {
        for at in [segment.physical, segment.physical.wrapping_add(segment.length).wrapping_sub(1)] {
            let _there = memory.read(at, &mut bytes);
        }
    }
    let _kernel = Kernel::open(Box::new(memory));
}

/// An ELF core of one page, and one whose memory ends behind the file; plain memory with VMCOREINFO.
pub(super) fn kernel_images() -> Vec<Vec<u8>> {
    let info = b"OSRELEASE=6.1.0\nPAGESIZE=4096\nSYMBOL(init_uts_ns)=ffffffff82000000\nKERNELOFFSET=0\n";
    let mut note = Vec::new();
    for word in [11_u32, u32::try_from(info.len()).unwrap_or_default(), 0] {
        note.extend(word.to_le_bytes());
    }
    note.extend(b"VMCOREINFO\0\0");
    note.extend(info);
    let core = |length: u64| {
        let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        bytes.extend([4_u16, 62].into_iter().flat_map(u16::to_le_bytes));
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend([0_u64, 64, 0].into_iter().flat_map(u64::to_le_bytes));
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend([64_u16, 56, 2, 0, 0, 0].into_iter().flat_map(u16::to_le_bytes));
        for (kind, offset, length) in [(4_u32, 64 + 112, note.len() as u64), (1, 4096, length)] {
            bytes.extend([kind, 0].into_iter().flat_map(u32::to_le_bytes));
            bytes.extend([offset, 0, 0x10_0000, length, length, 4096].into_iter().flat_map(u64::to_le_bytes));
        }
        bytes.extend(&note);
        bytes.resize(2 * 4096, 0x5a);
        bytes
    };
    let mut plain = vec![0; 8192];
    plain[4096..4096 + note.len()].copy_from_slice(&note);
    vec![core(4096), core(1 << 40), plain]
}

/// Code before a system call, which a program may have made itself.
pub(super) fn rewriting(input: &[u8]) {
    orrery_hijack::fuzzing::rewriting(input);
}

/// A service's unit, of a package that nobody has read.
pub(super) fn unit(input: &[u8]) {
    static DIRECTORY: OnceLock<Option<tempfile::TempDir>> = OnceLock::new();
    let Some(directory) = DIRECTORY.get_or_init(|| tempfile::tempdir().ok()) else { return };
    let path: PathBuf = directory.path().join("fuzzed.service");
    if fs::write(&path, input).is_err() {
        return;
    }
    let name: OsString = path.into();
    let Some(which) = name.to_str() else { return };
    if let Err(error) = orrery_orthros_host::read_unit(which, None::<&Path>) {
        assert!(!error.to_string().is_empty());
    }
}
