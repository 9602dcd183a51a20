//! Files, and what is in memory.

use std::ffi::OsString;
use std::fs;
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use orrery_kimage::{Kernel, Layout, PhysicalMemory as _, open_memory};
use orrery_orc_auditor::container;
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

/// A machine in whose memory words were overwritten, as by a kernel that went wrong.
pub(super) fn kernel_memory(input: &[u8]) {
    orrery_kimage::fuzzing::kernel_memory(input);
}

/// Machines with a change of each kind, each at another place.
pub(super) fn kernel_memories() -> Vec<Vec<u8>> {
    let change =
        |place: u16, kind: u8, value: u64| [&place.to_le_bytes()[..], &[kind], &value.to_le_bytes()].concat();
    let each = (0..8).map(|kind| change(64 + 97 * u16::from(kind), kind, 0x1_0000 + 0x100 * u64::from(kind)));
    let halves = [change(0x1000, 134, 7), change(0x1800, 198, 7)];
    [Vec::new()].into_iter().chain(each).chain(halves).collect()
}

/// A block of a disk that a service, or a kernel that was dying, has written.
pub(super) fn ext4_block(input: &[u8]) {
    orrery_kimage::fuzzing::ext4_block(input);
}

/// A directory of two names, and a block with an attribute, whose value is at its end.
pub(super) fn ext4_blocks() -> Vec<Vec<u8>> {
    let entry = |number: u32, length: u16, name: &[u8]| {
        let mut bytes = number.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend([u8::try_from(name.len()).unwrap_or(0), 1]);
        bytes.extend(name);
        bytes.resize(usize::from(length), 0);
        bytes
    };
    let directory = [entry(2, 12, b"."), entry(2, 12, b".."), entry(17, 1000, b"file")].concat();
    let mut attributes = vec![4, 1];
    attributes.extend(1000_u16.to_le_bytes());
    attributes.extend([0_u32, 5, 0].into_iter().flat_map(u32::to_le_bytes));
    attributes.extend(b"name");
    attributes.resize(1000, 0);
    attributes.extend(b"value");
    attributes.resize(1024, 0);
    vec![directory, attributes]
}

/// A symbolic link in an archive that a policy mounts.
pub(super) fn mount_link(input: &[u8]) {
    orrery_hijack::fuzzing::mount_link(input);
}

/// Links to within the mount and out of it, each with its directory and the mount's.
pub(super) fn mount_links() -> Vec<Vec<u8>> {
    ["/bin\0../lib/x\0/opt/app", "/bin\0/opt/app/lib\0/opt/app", "/a/b\0../../../other/x\0/opt/app"]
        .map(|text| text.as_bytes().to_vec())
        .to_vec()
}

unsafe extern "C" {
    fn fuzz_library(fd: std::ffi::c_int, size: u64, known: *mut u64) -> std::ffi::c_int;
}

/// The beginning of a library that a program opens, as the auditor reads it (C).
pub(super) fn library(input: &[u8]) {
    const MOST: u64 = 1 << 58;
    let Ok(file) = memfd_create("library", MemfdFlags::CLOEXEC) else { return };
    if rustix::io::write(&file, input) != Ok(input.len()) {
        return;
    }
    let mut known = [0_u64; 4];
    // SAFETY: there is room for the four numbers that the function writes.
    let is_worth = unsafe { fuzz_library(file.as_raw_fd(), input.len() as u64, known.as_mut_ptr()) } != 0;
    let [length, alignment, relocated, relocated_length] = known;
    if is_worth {
        assert!(length < MOST && length.is_multiple_of(4096) && alignment.is_power_of_two(), "{known:x?}");
        assert!(relocated < MOST && relocated_length < MOST && relocated.is_multiple_of(4096), "{known:x?}");
    }
}

/// Libraries of which the auditor keeps the place, with much and with little relocated.
pub(super) fn libraries() -> Vec<Vec<u8>> {
    let library = |relocated: u64| {
        let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        bytes.extend([3_u16, 62].into_iter().flat_map(u16::to_le_bytes));
        bytes.extend(1_u32.to_le_bytes());
        bytes.extend([0_u64, 64, 0].into_iter().flat_map(u64::to_le_bytes));
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend([64_u16, 56, 2, 0, 0, 0].into_iter().flat_map(u16::to_le_bytes));
        for (kind, address, length) in [(1_u32, 0_u64, 4_u64 << 20), (0x6474_e552, 1 << 20, relocated)] {
            bytes.extend([kind, 5].into_iter().flat_map(u32::to_le_bytes));
            bytes.extend([0, address, address, length, length, 4096].into_iter().flat_map(u64::to_le_bytes));
        }
        bytes.resize(2048, 0);
        bytes
    };
    vec![library(64 << 10), library(4096)]
}

/// Code before a system call, which a program may have made itself.
pub(super) fn rewriting(input: &[u8]) {
    orrery_hijack::fuzzing::rewriting(input);
}

/// The configuration of a container, of whoever made its bundle: editing keeps what it runs, and changes nothing the second time.
pub(super) fn container_config(input: &[u8]) {
    let Ok(before) = serde_json::from_slice::<serde_json::Value>(input) else { return };
    let _has = container::has_number(&before, 0);
    let (store, tree) = (Path::new("/run/store"), Path::new("/trees/one"));
    let auditor = format!("{}/liborrery-orc.so", container::INSIDE);
    let mut edited = before.clone();
    if container::edit(&mut edited, store, None, &auditor).is_ok() {
        assert_eq!(edited["process"]["args"], before["process"]["args"]);
        let mut again = edited.clone();
        assert!(container::edit(&mut again, store, None, &auditor).is_ok());
        assert_eq!(again, edited);
        let listed = edited["process"]["env"].as_array().is_some_and(|variables| {
            let lists = |variable: &serde_json::Value| {
                variable.as_str().is_some_and(|text| text.starts_with("LD_AUDIT=") && text.contains(&auditor))
            };
            variables.iter().any(lists)
        });
        assert!(listed, "the auditor is not in the environment");
        let _auditor = container::auditor(&edited);
    }
    // A guard as well: whatever is guarded starts by the guard's words, and the program's come last.
    let additions = orrery_monitor::container::Additions {
        files: vec![("/host/orrery".into(), "orrery".to_owned())],
        command: vec!["/.orrery-guard/orrery".to_owned(), "guard".to_owned()],
    };
    let mut guarded = before.clone();
    match orrery_monitor::container::edit(&mut guarded, &additions) {
        Ok(()) => {
            let words = |config: &serde_json::Value| {
                config["process"]["args"].as_array().cloned().unwrap_or_default()
            };
            let (all, own) = (words(&guarded), words(&before));
            assert!(all.len() > own.len() + 2 && all.ends_with(&own) && all[0] == "/.orrery-guard/orrery");
            assert_eq!(all[all.len() - own.len() - 1], "--");
            let of_loaders = |variable: &serde_json::Value| {
                variable.as_str().is_some_and(|text| text.starts_with("LD_PRELOAD="))
            };
            assert!(!guarded["process"]["env"].as_array().is_some_and(|all| all.iter().any(of_loaders)));
        }
        Err(message) => {
            assert!(!message.is_empty());
            assert_eq!(guarded, before);
        }
    }
    let mut moved = before.clone();
    match container::set_root(&mut moved, tree) {
        Ok(()) => assert_eq!(moved["root"]["path"].as_str(), tree.to_str()),
        Err(_) => assert_eq!(moved, before),
    }
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

/// A layer of an image: its changes, as often as they are made, come to a tree whose names stay within it.
pub(super) fn registry_layer(input: &[u8]) {
    use orrery_orc_registry::{archive, image::Image};
    let mut left = 1_u64 << 20;
    let read = archive::read(input, |file| {
        let length = std::io::copy(&mut file.take(left), &mut std::io::sink())?;
        left -= length;
        if left == 0 {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        Ok((orrery_orc_wire::ObjectId([7; 32]), length))
    });
    let Ok(changes) = read else { return };
    let mut image = Image::default();
    for _ in 0..2 {
        if image.apply(changes.clone()).is_err() {
            return;
        }
    }
    let Ok(tree) = image.into_tree() else { return };
    for entry in tree.entries() {
        let is_name = |part| matches!(part, std::path::Component::Normal(_));
        assert!(entry.path.components().all(is_name), "{:?}", entry.path);
    }
}
