//! Open files: a process' descriptors, what each stands for, and the paths that lead to them.
//!
//! A path is put together backwards: from the name's entry (dentry) to the root of its file system, from there to the
//! place where that is mounted, and so on to the root of the process.

use crate::error::{Error, Result, Walk};
use crate::object::Object;
use crate::task::Task;
use crate::volume::Attributes;

/// The default of `fs.nr_open`, eight times: a table that claims more is taken for a broken one.
const MOST_DESCRIPTORS: u64 = 1 << 23;
/// After so many broken descriptors it is the table that is broken.
const MOST_PROBLEMS: usize = 1000;
/// As many steps as any path can have: `PATH_MAX` / 2.
const MOST_STEPS: usize = 2048;
const TYPE_MASK: u64 = 0o170_000;

/// What a descriptor stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A file with bytes on some file system.
    Regular,
    /// A directory.
    Directory,
    /// A device that moves bytes.
    CharacterDevice,
    /// A device that moves blocks.
    BlockDevice,
    /// One end of a pipe, with or without a name.
    Pipe,
    /// A socket.
    Socket,
    /// Something without a name: an eventfd, epoll, timerfd, ...
    Anonymous,
    /// A symbolic link, opened with `O_PATH`.
    Link,
}

/// An open file description: what descriptors, here or in other processes, share.
#[derive(Clone, Copy, Debug)]
pub struct OpenFile<'k> {
    object: Object<'k>,
}

/// A descriptor of a process.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor<'k> {
    /// The number of the file descriptor.
    pub number: u32,
    /// Whether `execve` closes it.
    pub closes_on_exec: bool,
    /// What it stands for.
    pub file: OpenFile<'k>,
}

/// The names that stand for a place, and whether it can still be reached by them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// The path as the process would have seen it; bytes, because nothing says that names are text.
    pub bytes: Vec<u8>,
    /// Whether the last name was removed.
    pub deleted: bool,
}

impl Path {
    /// As `/proc/PID/fd` shows it.
    #[must_use]
    pub fn display(&self) -> String {
        let mut text = String::from_utf8_lossy(&self.bytes).into_owned();
        if self.deleted {
            text.push_str(" (deleted)");
        }
        text
    }
}

impl<'k> Task<'k> {
    /// Its descriptors by ascending number; those of a zombie are gone.
    pub fn descriptors(&self) -> Walk<Descriptor<'k>> {
        let mut walk = Walk::default();
        if let Err(error) = self.collect_descriptors(&mut walk) {
            walk.note("the table of descriptors".to_owned(), error);
        }
        walk
    }

    fn collect_descriptors(&self, walk: &mut Walk<Descriptor<'k>>) -> Result<()> {
        let kernel = self.object().kernel();
        let Some(files) = self.object().pointer("files", "files_struct")? else { return Ok(()) };
        let table = files.required("fdt", "fdtable")?;
        let count = u64::from(table.u32("max_fds")?);
        if count > MOST_DESCRIPTORS || count % 64 != 0 {
            return Err(table.corrupt(format!("it would have {count} descriptors")));
        }
        let bitmap = |path| -> Result<u64> { Ok(table.required(path, "bitmap")?.address()) };
        let (open, closing, files) = (bitmap("open_fds")?, bitmap("close_on_exec")?, bitmap("fd")?);
        for word in 0..count / 64 {
            // The table may be large and nearly empty: look only where a bit is set.
            let open = kernel.read_u64(open.wrapping_add(word * 8))?;
            if open == 0 {
                continue;
            }
            let closing = kernel.read_u64(closing.wrapping_add(word * 8))?;
            for bit in (0..64).filter(|bit| open >> bit & 1 != 0) {
                let number = word * 64 + bit;
                let file = kernel.read_u64(files.wrapping_add(number * 8)).and_then(|address| {
                    // Reserved while `open` is under way.
                    if address == 0 { Ok(None) } else { kernel.object("file", address).map(Some) }
                });
                let descriptor = file.and_then(|file| file.map(OpenFile::check).transpose()).map(|file| {
                    let closes_on_exec = closing >> bit & 1 != 0;
                    let number = u32::try_from(number).unwrap_or(u32::MAX);
                    file.map(|file| Descriptor { number, closes_on_exec, file })
                });
                match descriptor {
                    Ok(descriptor) => walk.found.extend(descriptor),
                    Err(error) => walk.note(format!("descriptor {number}"), error),
                }
                if walk.problems.len() >= MOST_PROBLEMS {
                    return Err(table.corrupt(format!("{MOST_PROBLEMS} of its descriptors are broken")));
                }
            }
        }
        Ok(())
    }

    /// Returns its working directory and its root directory.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn directories(&self) -> Result<(Path, Path)> {
        let fs = self.object().required("fs", "fs_struct")?;
        let of = |path| -> Result<Path> { resolve(fs.embedded(path, "path")?) };
        Ok((of("pwd")?, of("root")?))
    }

    /// Returns what its working directory's inode tells, and the address of that.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn working_directory(&self) -> Result<(u64, Attributes)> {
        let fs = self.object().required("fs", "fs_struct")?;
        let inode = fs.required("pwd.dentry", "dentry")?.required("d_inode", "inode")?;
        Ok((inode.address(), crate::volume::attributes(inode)?))
    }

    /// The program that it runs.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn executable(&self) -> Result<Option<OpenFile<'k>>> {
        let Some(space) = self.address_space()? else { return Ok(None) };
        space.object().pointer("exe_file", "file")?.map(OpenFile::check).transpose()
    }
}

impl<'k> OpenFile<'k> {
    /// Takes an object for an open file only if it looks like one.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`].
    pub fn check(object: Object<'k>) -> Result<Self> {
        let inode = object.required("f_inode", "inode")?;
        if inode.u64("i_mode")? & TYPE_MASK == 0 && !Self::is_anonymous(inode)? {
            return Err(inode.corrupt("it has no type"));
        }
        Ok(Self { object })
    }

    fn is_anonymous(inode: Object<'k>) -> Result<bool> {
        let kind = inode.required("i_sb", "super_block")?.required("s_type", "file_system_type")?;
        Ok(kind.string("name")? == b"anon_inodefs")
    }

    /// Returns its `struct file`.
    #[must_use]
    pub fn object(&self) -> Object<'k> {
        self.object
    }

    /// Returns the inode of the file.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn inode(&self) -> Result<Object<'k>> {
        self.object.required("f_inode", "inode")
    }

    /// Returns the number of its inode.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn inode_number(&self) -> Result<u64> {
        self.inode()?.u64("i_ino")
    }

    /// The flags it was opened with, as `fcntl(F_GETFL)` gives them, and more (`O_CREAT` is not kept).
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn flags(&self) -> Result<u32> {
        self.object.u32("f_flags")
    }

    /// Returns where the next read or write takes place.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn position(&self) -> Result<u64> {
        self.object.u64("f_pos")
    }

    /// Type and permissions, as `stat` gives them.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn mode(&self) -> Result<u32> {
        self.inode()?.u32("i_mode")
    }

    /// Returns what kind of file it is.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn kind(&self) -> Result<FileKind> {
        let inode = self.inode()?;
        if Self::is_anonymous(inode)? {
            return Ok(FileKind::Anonymous);
        }
        Ok(match inode.u64("i_mode")? & TYPE_MASK {
            0o100_000 => FileKind::Regular,
            0o040_000 => FileKind::Directory,
            0o020_000 => FileKind::CharacterDevice,
            0o060_000 => FileKind::BlockDevice,
            0o010_000 => FileKind::Pipe,
            0o140_000 => FileKind::Socket,
            0o120_000 => FileKind::Link,
            other => return Err(inode.corrupt(format!("its type would be {other:#o}"))),
        })
    }

    /// Returns whether some path may lead to it: what it is on is mounted where processes see it. What the kernel has
    /// for itself only (namespaces, message queues), what was unmounted since, and what was made by `fsmount` and
    /// never put anywhere has no place in the tree of names.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn is_in_tree(&self) -> Result<bool> {
        /// `MAX_ERRNO`: the highest addresses are errors.
        const ERRORS: u64 = 4095;
        let mount = self.object.required("f_path.mnt", "vfsmount")?.container("mount", "mnt")?;
        let space = mount.u64("mnt_ns")?;
        if space == 0 || space >= u64::MAX - ERRORS {
            return Ok(false);
        }
        // The one of a mount that was never put anywhere has no number.
        let space = mount.required("mnt_ns", "mnt_namespace")?;
        Ok(!space.has("seq") || space.u64("seq")? != 0)
    }

    /// Returns whether it is a file of `/proc` about a process that is gone.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn is_about_gone_process(&self) -> Result<bool> {
        if self.file_system()? != "proc" {
            return Ok(false);
        }
        let pid = self.inode()?.container("proc_inode", "vfs_inode")?.pointer("pid", "pid")?;
        // A list of processes for each use of the number.
        Ok(pid
            .map(|pid| pid.bytes("tasks"))
            .transpose()?
            .is_some_and(|lists| lists.iter().all(|&byte| byte == 0)))
    }

    /// Returns the name of the type of its file system, such as `ext4`.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn file_system(&self) -> Result<String> {
        let block = self.inode()?.required("i_sb", "super_block")?;
        let name = block.required("s_type", "file_system_type")?.string("name")?;
        Ok(String::from_utf8_lossy(&name).into_owned())
    }

    /// The path to it, or the name that `/proc/PID/fd` gives to what has none, as `pipe:[17]`.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`] where the names go round.
    pub fn path(&self) -> Result<Path> {
        let number = || self.inode_number();
        let unnamed = |text: String| Path { bytes: text.into_bytes(), deleted: false };
        let file_system = self.file_system()?;
        match file_system.as_str() {
            "pipefs" => Ok(unnamed(format!("pipe:[{}]", number()?))),
            "sockfs" => Ok(unnamed(format!("socket:[{}]", number()?))),
            "anon_inodefs" => {
                let name = name(self.object.embedded("f_path", "path")?.required("dentry", "dentry")?)?;
                Ok(unnamed(format!("anon_inode:{}", String::from_utf8_lossy(&name))))
            }
            _ => resolve(self.object.embedded("f_path", "path")?),
        }
    }
}

/// Returns a name's bytes.
pub(crate) fn name(dentry: Object<'_>) -> Result<Vec<u8>> {
    let length = usize::try_from(dentry.u32("d_name.len")?).unwrap_or(usize::MAX);
    if length > 255 {
        return Err(dentry.corrupt(format!("a name of {length} bytes")));
    }
    let mut bytes = vec![0; length];
    dentry.kernel().read(dentry.u64("d_name.name")?, &mut bytes)?;
    Ok(bytes)
}

/// Puts the path together that a `struct path` stands for.
pub(crate) fn resolve(path: Object<'_>) -> Result<Path> {
    let mount = path.required("mnt", "vfsmount")?.container("mount", "mnt")?;
    resolve_at(path.required("dentry", "dentry")?, mount)
}

/// Puts the path together that leads to a name where its file system is mounted.
pub(crate) fn resolve_at<'k>(mut dentry: Object<'k>, mut mount: Object<'k>) -> Result<Path> {
    let is_root = |dentry: Object<'_>| -> Result<bool> { Ok(dentry.u64("d_parent")? == dentry.address()) };
    // A name that is in no hash table was removed; a root is in none either, and is called "/": what is its own root by
    // another name (a memfd, shared memory) never had a place.
    let is_top = is_root(dentry)? && name(dentry)? == b"/";
    let deleted = !is_top && dentry.u64("d_hash.pprev")? == 0;
    let mut names = Vec::new();
    for _ in 0..MOST_STEPS {
        let mount_root = mount.u64("mnt.mnt_root")?;
        if dentry.address() == mount_root || is_root(dentry)? {
            let parent = mount.required("mnt_parent", "mount")?;
            if parent.address() == mount.address() {
                // What no process can reach by a path begins with its own name: a memfd, for one.
                if dentry.address() != mount_root || names.is_empty() {
                    let own = name(dentry)?;
                    if own != b"/" {
                        names.push(own);
                    }
                }
                let mut bytes = Vec::new();
                for name in names.iter().rev() {
                    bytes.push(b'/');
                    bytes.extend_from_slice(name);
                }
                if bytes.is_empty() {
                    bytes.push(b'/');
                }
                return Ok(Path { bytes, deleted });
            }
            dentry = mount.required("mnt_mountpoint", "dentry")?;
            mount = parent;
        } else {
            names.push(name(dentry)?);
            dentry = dentry.required("d_parent", "dentry")?;
        }
    }
    Err(Error::Corrupt { kind: "dentry", address: dentry.address(), why: "its path never ends".to_owned() })
}
