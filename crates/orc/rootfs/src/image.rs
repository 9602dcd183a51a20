//! Images of trees for virtual machines: file systems (EROFS) that cannot be written to, in files that cannot change.
//!
//! A hypervisor maps the file and shows it to its guest as memory (virtio-pmem). The guest mounts it with DAX: its programs map the
//! pages of the host's page cache, and the guest keeps no copies. So all guests of one image have its pages in memory once. Three
//! things make that possible:
//!
//! - The bytes of files are in whole blocks of 4 KiB, uncompressed, and never beside an inode. Equal chunks of 64 KiB are there once.
//! - The size of the file is a multiple of 2 MiB: Linux maps persistent memory in such units.
//! - The file is immutable, as contents are. No hypervisor can map it for writing.
//!
//! Equal trees have equal images, on all machines: times are those of the files, and the UUID is derived from what the tree has.
//! The program mkfs.erofs (package erofs-utils) writes the image; what it must not do wrong is checked afterwards.

mod program;
mod scan;

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use orrery_orc_wire::ObjectId;
use rustix::fs::{CWD, RenameFlags};

use crate::content::{remove_immutable, set_immutable, try_immutable};
use crate::draft::Draft;
use crate::error::{Error, Result};
use scan::Scan;

/// Linux maps persistent memory in units of this size (`SUBSECTION_SIZE` in `include/linux/mmzone.h`).
const ALIGNMENT: u64 = 2 << 20;
/// Where the superblock is, and its length (`fs/erofs/erofs_fs.h`).
const SUPERBLOCK: (u64, usize) = (1024, 128);
/// The first four bytes of the superblock.
const MAGIC: u32 = 0xe0f5_e1e2;
/// The size of a block is two to the power of this.
const BLOCK_BITS: u8 = 12;

/// An image that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// The BLAKE3 hash of its bytes.
    pub id: ObjectId,
    /// The UUID of its file system.
    pub uuid: String,
    /// The size of the file in bytes.
    pub size: u64,
    /// Regular files with bytes in the tree.
    pub files: u64,
    /// The size of these files in bytes.
    pub bytes: u64,
}

/// Writes the image of a tree to a file that does not exist, which becomes immutable, with the owner and the group of its directory, who
/// alone may read it. With several trees the image has a directory for each, under the name that is given; with one, the name counts for
/// nothing. What is mounted below a tree and sockets are left out.
///
/// # Errors
/// [`Error::Changes`] if a tree changes meanwhile; [`Error::Immutable`] if the file could not be made immutable; [`Error::NoProgram`],
/// [`Error::Program`] and [`Error::NoSpace`] if mkfs.erofs does not write it; [`Error::Busy`] if another process writes the same image;
/// [`Error::File`], with `EEXIST` if the file is there. Then no file is left.
pub fn write(trees: &[(String, PathBuf)], to: &Path) -> Result<Image> {
    let exists = || Error::file("create", to)(rustix::io::Errno::EXIST);
    if fs::symlink_metadata(to).is_ok() {
        return Err(exists());
    }
    let directory = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    for (_, tree) in trees {
        let real = |path: &Path| fs::canonicalize(path).map_err(Error::file("find", path));
        if directory.exists() && real(directory)?.starts_with(real(tree)?) {
            let inside = "it is in the tree; choose another directory";
            return Err(Error::file("create", to)(io::Error::other(inside)));
        }
    }
    let mut name = std::ffi::OsString::from(".");
    name.push(to.file_name().unwrap_or_default());
    name.push(".draft");
    let program = program::find()?;
    let draft_path = directory.join(name);
    let _draft = Draft::new(&draft_path)?;
    let image = draft_path.join(program::IMAGE);
    let file = File::options().read(true).write(true).create_new(true).open(&image);
    let file = file.map_err(Error::file("create", &image))?;
    try_immutable(file.as_fd(), directory)?;

    let before = Scan::of(trees)?;
    let written = program.run(&draft_path, trees, &before);
    if let Some(changed) = before.difference(&Scan::of(trees)?) {
        return Err(Error::Changes(changed));
    }
    written?;
    let size = finish(&file, &image)?;
    let id = hash(&file).map_err(Error::file("read", &image))?;

    let found = fs::metadata(directory).map_err(Error::file("look at", directory))?;
    std::os::unix::fs::fchown(&file, Some(found.uid()), Some(found.gid()))
        .and_then(|()| file.set_permissions(fs::Permissions::from_mode(0o440)))
        .and_then(|()| file.sync_all())
        .map_err(Error::file("store", &image))?;
    match rustix::fs::renameat_with(CWD, &image, CWD, to, RenameFlags::NOREPLACE) {
        Err(rustix::io::Errno::EXIST) => return Err(exists()),
        other => other.map_err(Error::file("create", to))?,
    }
    // An immutable file cannot be renamed.
    if let Err(errno) = set_immutable(file.as_fd(), true) {
        let _ = fs::remove_file(to);
        return Err(Error::file("make immutable", to)(errno));
    }
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(Error::file("store", to))?;
    Ok(Image { id, uuid: before.uuid(), size, files: before.files, bytes: before.bytes })
}

/// Removes an image. Guests that have it keep it until they end.
///
/// # Errors
/// [`Error::NoImage`] if the file is none; [`Error::File`].
pub fn remove(image: &Path) -> Result<()> {
    let found = fs::symlink_metadata(image).map_err(Error::file("look at", image))?;
    let is_image = found.is_file() && {
        let file = File::open(image).map_err(Error::file("open", image))?;
        superblock(&file).is_ok()
    };
    match is_image {
        true => remove_immutable(image).map_err(Error::file("remove", image)),
        false => Err(Error::NoImage(image.to_owned())),
    }
}

/// Checks what was written and fills it up to its full size, which is returned.
fn finish(file: &File, path: &Path) -> Result<u64> {
    let failed = || Error::file("read", path);
    let blocks = superblock(file)
        .map_err(|reason| Error::Program { program: program::NAME, reason: reason.to_owned() })?;
    let length = file.metadata().map_err(failed())?.len();
    if length < blocks << BLOCK_BITS {
        let reason = format!("it wrote {length} bytes of {}", blocks << BLOCK_BITS);
        return Err(Error::Program { program: program::NAME, reason });
    }
    let size = length.next_multiple_of(ALIGNMENT);
    file.set_len(size).map_err(Error::file("write", path))?;
    Ok(size)
}

/// Returns the number of blocks of the file system in a file, or what is wrong with its superblock.
fn superblock(file: &File) -> std::result::Result<u64, &'static str> {
    let mut bytes = [0; SUPERBLOCK.1];
    file.read_exact_at(&mut bytes, SUPERBLOCK.0).map_err(|_| "it wrote no file system")?;
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    if word(0) != MAGIC {
        return Err("it wrote no EROFS file system");
    }
    if bytes[12] != BLOCK_BITS {
        return Err("it wrote a file system whose blocks are not of 4 KiB");
    }
    Ok(word(36).into())
}

fn hash(file: &File) -> io::Result<ObjectId> {
    let mut hash = blake3::Hasher::new();
    let mut from = file;
    io::Seek::rewind(&mut from)?;
    hash.update_reader(from)?;
    Ok(ObjectId(*hash.finalize().as_bytes()))
}
