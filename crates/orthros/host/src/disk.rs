//! The service's disk: an image with an ext4 on it, which the machine that has the service has plugged in.
//!
//! Both machines have a place for it, a port of PCI Express that devices can be plugged into while the machine runs.
//! The first active has it from the start. When a kernel dies its QEMU is ended, which closes the image, and the image
//! is plugged into the backup. No two machines ever have it open: QEMU locks images, and the first one is gone.

use std::fs;
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::command::{require, run};
use crate::error::{Error, Result, file};
use crate::qmp::Qmp;

const PORT: &str = "disk-port";
const NODE: &str = "disk";
/// Where an ext4 has its magic number: in its superblock, which begins after 1 KiB.
const MAGIC_AT: u64 = 1024 + 0x38;
const MAGIC: [u8; 2] = [0x53, 0xef];
/// Where the kernel shows its block devices, and what a loop device is made of.
const DEVICES: &str = "/sys/block";
/// The bytes of an image that QEMU locks to say what it does with it (QEMU `block/file-posix.c`).
const LOCKED: std::ops::Range<libc::off_t> = 100..300;
const SMALLEST: u64 = 8 << 20;
const LARGEST: u64 = 16 << 40;

/// What a disk is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskSource {
    /// A new one of so many bytes, which goes with the pair.
    New(u64),
    /// An image of the user's, which is changed.
    Image(PathBuf),
}

/// A disk that is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Where it comes from.
    pub source: DiskSource,
    /// Where the service expects it.
    pub mount: String,
    /// A directory of this host whose files a new one has.
    pub content: Option<PathBuf>,
}

impl DiskSource {
    /// `64M`, `2G`: a new disk; anything else: an image's path.
    ///
    /// # Errors
    ///
    /// Why a size is none that a disk can have.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (digits, unit) = text.split_at(text.len() - text.chars().last().map_or(0, char::len_utf8));
        let shift = match unit {
            "M" | "m" => 20,
            "G" | "g" => 30,
            _ => return Ok(Self::Image(PathBuf::from(text))),
        };
        let Ok(number) = digits.parse::<u64>() else { return Ok(Self::Image(PathBuf::from(text))) };
        match number.checked_mul(1 << shift) {
            Some(bytes) if (SMALLEST..=LARGEST).contains(&bytes) => Ok(Self::New(bytes)),
            _ => Err(format!("a disk of {text}: it has from {}M to {}G", SMALLEST >> 20, LARGEST >> 30)),
        }
    }
}

/// An image that is there.
#[derive(Clone, Debug)]
pub(crate) struct Disk {
    image: PathBuf,
    pub(crate) mount: String,
}

impl Disk {
    /// Makes the image in `directory`, or looks at the one that is there.
    pub(crate) fn obtain(config: &DiskConfig, directory: &Path) -> Result<Self> {
        let mount = config.mount.clone();
        if !Path::new(&mount).is_absolute() || mount == "/" || mount.contains([' ', ',', '"']) {
            return Err(Error::Disk {
                path: mount.into(),
                why: "a disk is mounted on an absolute path".to_owned(),
            });
        }
        let image = match &config.source {
            DiskSource::Image(image) => {
                if config.content.is_some() {
                    let why = "only a new disk can be given contents".to_owned();
                    return Err(Error::Disk { path: image.clone(), why });
                }
                let whole = fs::canonicalize(image).map_err(file("open", image))?;
                examine(image)?;
                if let Some(device) = loop_device(&whole, Path::new(DEVICES)) {
                    let why = format!(
                        "this host has it as {device}, and what both write would be lost; detach that first \
                         (umount {device}; losetup -d {device}), or give the service another image"
                    );
                    return Err(Error::Disk { path: image.clone(), why });
                }
                whole
            }
            DiskSource::New(bytes) => {
                let image = directory.join("disk");
                create(&image, *bytes, config.content.as_deref())?;
                image
            }
        };
        Ok(Self { image, mount })
    }

    /// The file that it is on.
    pub(crate) fn image(&self) -> &Path {
        &self.image
    }

    /// Returns what a machine needs to have it plugged in later.
    pub(crate) fn port() -> [String; 2] {
        ["-device".to_owned(), format!("pcie-root-port,id={PORT},chassis=1,slot=1")]
    }

    fn node(&self) -> serde_json::Value {
        json!({"driver": "raw", "node-name": NODE, "file": {"driver": "file", "filename": self.image}})
    }

    /// Returns what a machine needs to have it from the start.
    pub(crate) fn arguments(&self) -> [String; 4] {
        let device = format!("virtio-blk-pci,bus={PORT},drive={NODE}");
        ["-blockdev".to_owned(), self.node().to_string(), "-device".to_owned(), device]
    }

    /// Plugs it into a machine that runs.
    pub(crate) fn plug(&self, qmp: &mut Qmp) -> Result<()> {
        qmp.execute("blockdev-add", &self.node())?;
        qmp.execute(
            "device_add",
            &json!({"driver": "virtio-blk-pci", "bus": PORT, "drive": NODE, "id": "disk-device"}),
        )
        .map(drop)
    }
}

fn create(image: &Path, bytes: u64, content: Option<&Path>) -> Result<()> {
    let mkfs = require("mkfs.ext4", "e2fsprogs")?;
    fs::File::create(image).and_then(|image| image.set_len(bytes)).map_err(file("create", image))?;
    let mut arguments: Vec<&Path> = ["-q", "-F", "-b", "4096"].map(Path::new).to_vec();
    let owner = content.map(fs::metadata).transpose().map_err(file("look at", content.unwrap_or(image)))?;
    let owner = owner.map(|content| format!("root_owner={}:{}", content.uid(), content.gid()));
    if let (Some(content), Some(owner)) = (content, &owner) {
        // What is in the directory keeps its owners; the root of the disk takes that of the directory only if asked to.
        arguments.extend([Path::new("-d"), content, Path::new("-E"), Path::new(owner)]);
    }
    arguments.push(image);
    run(&mkfs, &arguments, None).map(drop)
}

/// Makes sure that an image is an ext4, with nothing around it, and nobody else's.
fn examine(image: &Path) -> Result<()> {
    let refused = |why: &str| Err(Error::Disk { path: image.to_owned(), why: why.to_owned() });
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true);
    if fs::metadata(image).is_ok_and(|metadata| metadata.file_type().is_block_device()) {
        // The kernel refuses this where the device is mounted, or part of another one: open(2).
        options.custom_flags(libc::O_EXCL);
    }
    let mut opened = match options.open(image) {
        Err(error) if error.kind() == ErrorKind::ResourceBusy => {
            return refused(
                "this host uses the device, which is mounted or part of another one; unmount it first, or give the \
                 service another one",
            );
        }
        other => other.map_err(file("open", image))?,
    };
    if is_locked(&opened) {
        return refused(
            "another program has this image, and has locked it, as QEMU does; end that first, or give the service another one",
        );
    }
    let mut magic = [0; 2];
    let read = opened.seek(SeekFrom::Start(MAGIC_AT)).and_then(|_| opened.read_exact(&mut magic));
    if read.is_err() || magic != MAGIC {
        let why = "it is no ext4 (make one with mkfs.ext4; partitions are not looked into)".to_owned();
        return Err(Error::Disk { path: image.to_owned(), why });
    }
    Ok(())
}

/// Returns whether another process has locked what QEMU would lock. Nothing is locked here: between now and then
/// there is QEMU's own look.
fn is_locked(image: &fs::File) -> bool {
    let mut lock = lock(libc::F_WRLCK, LOCKED);
    // SAFETY: the descriptor is open, and the description of a lock is writable.
    let asked = unsafe { libc::fcntl(image.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    asked == 0 && i32::from(lock.l_type) != libc::F_UNLCK
}

/// A lock of some bytes, as fcntl(2) wants it described.
#[expect(
    clippy::cast_possible_truncation,
    reason = "these constants are small; the structure has short fields for them"
)]
fn lock(kind: libc::c_int, bytes: std::ops::Range<libc::off_t>) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: bytes.start,
        l_len: bytes.end - bytes.start,
        l_pid: 0,
    }
}

/// The loop device that is made of an image, if there is one.
fn loop_device(image: &Path, devices: &Path) -> Option<String> {
    let mut entries = fs::read_dir(devices).ok()?.flatten();
    let made_of_it = |entry: &fs::DirEntry| {
        let backing = fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        Path::new(backing.trim_end_matches('\n')) == image
    };
    Some(format!("/dev/{}", entries.find(made_of_it)?.file_name().to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_paths_are_told_apart() {
        assert_eq!(DiskSource::parse("64M"), Ok(DiskSource::New(64 << 20)));
        assert_eq!(DiskSource::parse("2G"), Ok(DiskSource::New(2 << 30)));
        for path in ["disk.img", "./64M/disk", "M", "", "ж", "64MM"] {
            assert_eq!(DiskSource::parse(path), Ok(DiskSource::Image(path.into())));
        }
        assert!(DiskSource::parse("1M").unwrap_err().contains("8M"));
        assert!(DiskSource::parse("99999999999999999G").is_err());
    }

    #[test]
    fn what_is_no_ext4_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        let config = |mount: &str| DiskConfig {
            source: DiskSource::Image(image.clone()),
            mount: mount.to_owned(),
            content: None,
        };
        let refused = |mount| Disk::obtain(&config(mount), directory.path()).unwrap_err().to_string();
        assert!(refused("/data").contains("cannot open"));
        fs::write(&image, "too short").unwrap();
        assert!(refused("/data").contains("no ext4"));
        fs::write(&image, vec![0; 1 << 16]).unwrap();
        assert!(refused("/data").contains("no ext4"));
        assert!(refused("data").contains("absolute"));
    }

    #[test]
    fn an_image_that_somebody_has_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        let mut bytes = vec![0; 1 << 16];
        bytes[1080..1082].copy_from_slice(&MAGIC);
        fs::write(&image, bytes).unwrap();
        examine(&image).unwrap();
        let other = fs::File::open(&image).unwrap();
        // As QEMU does: a shared lock of one byte for each thing that it does.
        let mut lock = lock(libc::F_RDLCK, 201..202);
        // SAFETY: the descriptor is open, and the description of a lock is writable.
        assert_eq!(unsafe { libc::fcntl(other.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) }, 0);
        let message = examine(&image).unwrap_err().to_string();
        assert!(
            message.contains("locked") && message.contains("another one") && message.contains("image"),
            "{message}"
        );
        drop(other);
        examine(&image).unwrap();
        // What the kernel shows of loop devices.
        let (devices, device) = (directory.path().join("block"), directory.path().join("block/loop7/loop"));
        fs::create_dir_all(&device).unwrap();
        fs::create_dir_all(devices.join("sda")).unwrap();
        fs::write(device.join("backing_file"), format!("{}\n", image.display())).unwrap();
        assert_eq!(loop_device(&image, &devices).as_deref(), Some("/dev/loop7"));
        assert_eq!(loop_device(&directory.path().join("other"), &devices), None);
    }

    #[test]
    fn a_new_disk_has_what_it_is_given() {
        let directory = tempfile::tempdir().unwrap();
        let content = directory.path().join("content");
        fs::create_dir(&content).unwrap();
        fs::write(content.join("hello"), "world").unwrap();
        let is_root = std::os::unix::fs::chown(&content, Some(102), Some(105)).is_ok();
        let config = DiskConfig {
            source: DiskSource::New(16 << 20),
            mount: "/data".to_owned(),
            content: Some(content),
        };
        if let Err(error) = require("mkfs.ext4", "e2fsprogs") {
            orrery_testing::skipped!("{error}");
            return;
        }
        let disk = Disk::obtain(&config, directory.path()).unwrap();
        examine(&disk.image).unwrap();
        let bytes = fs::read(&disk.image).unwrap();
        assert!(bytes.windows(5).any(|window| window == b"world"));
        let listed = run(
            &require("debugfs", "e2fsprogs").unwrap(),
            &["-R", "stat /", disk.image.to_str().unwrap()],
            None,
        );
        let listed = listed.unwrap();
        assert!(!is_root || listed.contains("User:   102   Group:   105"), "{listed}");
    }
}
