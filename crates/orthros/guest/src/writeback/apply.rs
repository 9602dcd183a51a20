//! The plan, carried out on the mounted file system.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result, bail};
use orrery_kimage::CachedPage;
use orrery_orthros_wire::WrittenBack;
use rustix::fs::{AtFlags, FallocateFlags, FileType, Mode, OFlags, RenameFlags, Timespec, Timestamps};

use super::handle::{self, Mounted, dress};
use super::plan::{Contents, Plan, Planned, TOP};

/// Where everything waits that is not where it belongs.
const ASIDE: &str = ".orrery-rescue";
/// There, how the name begins that says of which death something was written already.
const BEGUN: &str = "begun-";
/// Where files go that have lost their name: who had it was just being given another, or removed.
const LOST: &str = "lost+found";
/// More of them at a time than there can be calls under way are a contradiction.
const MOST_LOST: usize = 16;
const PAGE: u64 = 4096;
/// So many pages are written at once.
const BATCH: usize = 256;

/// So many files are named where there is no room for all.
const MOST_TOLD: usize = 20;

/// The files that were written.
#[derive(Debug, Default)]
pub(crate) struct Written {
    pub(crate) counts: WrittenBack,
    /// What could not be carried over exactly.
    pub(crate) remarks: Vec<String>,
}

pub(super) fn apply(plan: &Plan<'_>, mounted: &Mounted) -> Result<Written> {
    let mut work = Work::begin(plan, mounted)?;
    work.create()?;
    work.set_aside()?;
    work.place()?;
    work.clear()?;
    // One for which there is no room does not keep the others from the disk.
    let mut short = Vec::new();
    for (number, file) in plan.files.iter().filter(|(_, file)| file.changed) {
        let put = work.fill(*number, file).with_context(|| format!("the contents of file {number}"))?;
        work.written.counts.bytes += put.written;
        if put.missing > 0 {
            short.push((work.path(*number)?, put.missing));
        }
    }
    // Last: what was done above has changed times.
    for (number, file) in plan.files.iter().filter(|(number, file)| file.changed || **number == TOP) {
        let attributes = &file.attributes;
        dress(work.file(*number)?, attributes, file.extended.as_deref())
            .with_context(|| format!("the attributes of file {number}"))?;
    }
    rustix::fs::syncfs(&mounted.top).context("cannot force it to the disk")?;
    if !short.is_empty() {
        bail!("{}", without_room(&short));
    }
    Ok(work.written)
}

/// Returns which files there is no room for, and how many bytes of each.
fn without_room(short: &[(String, u64)]) -> String {
    let bytes: u64 = short.iter().map(|(_, missing)| missing).sum();
    let named: Vec<String> =
        short.iter().take(MOST_TOLD).map(|(path, missing)| format!("{path} lacks {missing}")).collect();
    let more = short.len().saturating_sub(MOST_TOLD);
    let rest = if more > 0 { format!(", and {more} more files") } else { String::new() };
    format!(
        "the disk is full: {bytes} bytes of {} files are in the dead memory only: {}{rest}; all else is written. --keep leaves that \
         memory as a file if no try succeeds",
        short.len(),
        named.join(", ")
    )
}

/// Returns whether a try before this one has begun to write what was read from places that the disk takes for free.
pub(super) fn has_begun(mounted: &Mounted, death: u64) -> bool {
    let name = format!("{ASIDE}/{BEGUN}{death:x}");
    rustix::fs::statat(&mounted.top, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

/// Removes what would show the next try that this one had begun: there will be none. The top directory keeps its times.
pub(super) fn finish(mounted: &Mounted) -> Result<()> {
    let top = rustix::fs::fstat(&mounted.top)?;
    if rustix::fs::statat(&mounted.top, ASIDE, AtFlags::SYMLINK_NOFOLLOW).is_err() {
        return Ok(());
    }
    remove(&mounted.top, OsStr::new(ASIDE)).context("cannot clear the disk")?;
    let times = Timestamps {
        last_access: Timespec { tv_sec: top.st_atime, tv_nsec: top.st_atime_nsec.cast_signed() },
        last_modification: Timespec { tv_sec: top.st_mtime, tv_nsec: top.st_mtime_nsec.cast_signed() },
    };
    Ok(rustix::fs::futimens(&mounted.top, &times)?)
}

struct Work<'p, 'k> {
    plan: &'p Plan<'k>,
    mounted: &'p Mounted,
    aside: OwnedFd,
    /// What is aside, by its number on this disk.
    moved: BTreeMap<u64, Vec<String>>,
    /// Files that were made here, by the number that the dead kernel gave them.
    created: BTreeMap<u64, OwnedFd>,
    written: Written,
}

impl<'p, 'k> Work<'p, 'k> {
    fn begin(plan: &'p Plan<'k>, mounted: &'p Mounted) -> Result<Self> {
        match rustix::fs::mkdirat(&mounted.top, ASIDE, Mode::RWXU) {
            // Someone tried before, and was interrupted: what is there is used, or removed in the end.
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error).context("cannot make a directory on the disk"),
        }
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let aside = rustix::fs::openat(&mounted.top, ASIDE, flags, Mode::empty())?;
        let mut moved: BTreeMap<u64, Vec<String>> = BTreeMap::new();
        for (name, number) in list(&aside)? {
            let name = String::from_utf8_lossy(&name).into_owned();
            if name.starts_with(BEGUN) {
                remove(&aside, OsStr::new(&name))?;
            } else {
                moved.entry(number).or_default().push(name);
            }
        }
        if plan.reads_free_blocks() {
            // Known before anything else can reach the disk: contents get there sooner than names do.
            let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
            let begun = format!("{BEGUN}{:x}", plan.death);
            let begun = rustix::fs::openat(&aside, begun, flags, Mode::RUSR)?;
            rustix::fs::fsync(begun).context("cannot force it to the disk")?;
        }
        let mut written = Written::default();
        written.counts.files = plan.files.values().filter(|file| file.changed).count();
        Ok(Self { plan, mounted, aside, moved, created: BTreeMap::new(), written })
    }

    /// Returns the file that the dead kernel gave this number.
    fn file(&self, number: u64) -> Result<&OwnedFd> {
        let found = self.plan.files.get(&number).and_then(|file| file.found.as_ref());
        found
            .or_else(|| self.created.get(&number))
            .with_context(|| format!("a directory names file {number}, which is none"))
    }

    /// Makes all files that the disk does not have.
    fn create(&mut self) -> Result<()> {
        for (&number, file) in self.plan.files.iter().filter(|(_, file)| file.found.is_none()) {
            let name = format!("new-{number}");
            self.remove_aside(&name)?;
            make(&self.aside, &name, file).with_context(|| format!("cannot make file {number}"))?;
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let made = rustix::fs::openat(&self.aside, &*name, flags, Mode::empty())?;
            self.moved.entry(inode_number(&made)?).or_default().push(name);
            self.created.insert(number, made);
            self.written.counts.created += 1;
        }
        Ok(())
    }

    /// What a try before left under a name that is wanted.
    fn remove_aside(&mut self, name: &str) -> Result<()> {
        for names in self.moved.values_mut() {
            names.retain(|other| other != name);
        }
        remove(&self.aside, OsStr::new(name))
    }

    /// The number that a file has on this disk.
    fn number_here(&self, number: u64) -> Result<u64> {
        inode_number(self.file(number)?)
    }

    fn directory(&self, number: u64) -> Result<OwnedFd> {
        Ok(handle::open(self.file(number)?, OFlags::DIRECTORY)?.into())
    }

    /// Takes everything out of the changed directories that does not belong there, or not under that name.
    fn set_aside(&mut self) -> Result<()> {
        for (&number, names) in &self.plan.names {
            let wanted: BTreeMap<&[u8], u64> =
                names.iter().map(|name| (name.name.as_slice(), name.number)).collect();
            let directory = self.directory(number)?;
            for (name, here) in list(&directory)? {
                if number == TOP && name == ASIDE.as_bytes() {
                    continue;
                }
                if let Some(&wanted) = wanted.get(name.as_slice())
                    && self.number_here(wanted)? == here
                {
                    continue;
                }
                let place = format!("{here}-{}", self.written.counts.names);
                rustix::fs::renameat(&directory, OsStr::from_bytes(&name), &self.aside, &*place)
                    .with_context(|| format!("cannot move {:?} aside", String::from_utf8_lossy(&name)))?;
                self.moved.entry(here).or_default().push(place);
                self.written.counts.names += 1;
            }
        }
        Ok(())
    }

    /// Gives every file the names that it had.
    fn place(&mut self) -> Result<()> {
        for (&number, names) in &self.plan.names {
            let directory = self.directory(number)?;
            let there: BTreeMap<Vec<u8>, u64> = list(&directory)?.into_iter().collect();
            for name in names.iter().filter(|name| !there.contains_key(&name.name)) {
                self.place_one(&directory, OsStr::from_bytes(&name.name), name.number).with_context(
                    || format!("cannot make the name {:?}", String::from_utf8_lossy(&name.name)),
                )?;
                self.written.counts.names += 1;
            }
        }
        Ok(())
    }

    fn place_one(&mut self, directory: &OwnedFd, name: &OsStr, number: u64) -> Result<()> {
        let here = self.number_here(number)?;
        if let Some(from) = self.moved.get_mut(&here).and_then(Vec::pop) {
            return Ok(rustix::fs::renameat(&self.aside, &*from, directory, name)?);
        }
        let file = self.file(number)?;
        let is_directory = self.plan.files.get(&number).is_some_and(|file| is(file, libc::S_IFDIR));
        if !is_directory {
            return Ok(rustix::fs::linkat(file, "", directory, name, AtFlags::EMPTY_PATH)?);
        }
        // A directory has one name, so it moves, from wherever it is.
        let from = std::fs::read_link(handle::shown(file))?;
        Ok(rustix::fs::renameat(rustix::fs::CWD, &from, directory, name)?)
    }

    /// Removes what is aside: it was removed. A file that was there and has lost all its names is kept: it was just
    /// being renamed or removed, by a call that will fail.
    fn clear(&mut self) -> Result<()> {
        let mut lost = Vec::new();
        for (&number, file) in self.plan.files.iter().filter(|(_, file)| file.found.is_some()) {
            let here = self.number_here(number)?;
            let Some(names) = self.moved.get_mut(&here).filter(|names| !names.is_empty()) else { continue };
            let placed = link_count(file.found.as_ref().context("it is not there")?)?;
            // A directory counts those in it, too.
            let is_placed = !is(file, libc::S_IFDIR) && placed > names.len() as u64;
            if file.attributes.links > 0 && !is_placed {
                lost.extend(names.pop().map(|name| (name, here, number, file.attributes.size)));
            }
        }
        if lost.len() > MOST_LOST {
            bail!("{} files had names, and no directory holds them", lost.len());
        }
        for (name, here, number, size) in lost {
            self.keep(&name, here, number, size).with_context(|| format!("cannot keep file {here}"))?;
        }
        for name in self.moved.values().flatten() {
            remove(&self.aside, OsStr::new(name)).with_context(|| format!("cannot remove {name}"))?;
        }
        if self.plan.reads_free_blocks() {
            return Ok(());
        }
        rustix::fs::unlinkat(&self.mounted.top, ASIDE, AtFlags::REMOVEDIR).context("cannot clear the disk")
    }

    /// Keeps a file that has no name any more where `e2fsck` would put it, too.
    fn keep(&mut self, name: &str, here: u64, number: u64, size: u64) -> Result<()> {
        match rustix::fs::mkdirat(&self.mounted.top, LOST, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        // What is there under such a name is another program's.
        let (mut to, mut others) = (format!("{LOST}/#{here}"), 0);
        while let Err(error) =
            rustix::fs::renameat_with(&self.aside, name, &self.mounted.top, &to, RenameFlags::NOREPLACE)
        {
            others += 1;
            if error != rustix::io::Errno::EXIST || others > MOST_LOST {
                return Err(error.into());
            }
            to = format!("{LOST}/#{here}.{others}");
        }
        self.written.remarks.push(format!(
            "file {number} ({size} bytes), which was just being renamed or removed, has no name any more; it lies at {to}"
        ));
        Ok(())
    }

    /// Returns where a file is now.
    fn path(&self, number: u64) -> Result<String> {
        Ok(std::fs::read_link(handle::shown(self.file(number)?))?.display().to_string())
    }

    fn fill(&self, number: u64, file: &Planned<'_>) -> Result<Put> {
        let mut put = Put::default();
        if !is(file, libc::S_IFREG) {
            return Ok(put);
        }
        let out = handle::open(self.file(number)?, OFlags::RDWR)?;
        let size = file.attributes.size;
        // It grows only by what is written: another try takes what is below its end for what it should be.
        if size < out.metadata()?.len() {
            out.set_len(size).context("its size")?;
        }
        let Contents { holes, kept, pages, .. } = &file.contents;
        for &(offset, length) in holes {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&out, flags, offset, length)?;
        }
        for (offset, bytes) in kept {
            put.bytes(&out, *offset, bytes, size)?;
        }
        let mut rest = pages.as_slice();
        while let Some(first) = rest.first() {
            let mut count = 1;
            while count < rest.len().min(BATCH) && rest[count].index == first.index + count as u64 {
                count += 1;
            }
            let (run, after) = rest.split_at(count);
            put.pages(&out, run, size)?;
            rest = after;
        }
        out.set_len(size).context("its size")?;
        Ok(put)
    }
}

fn is(file: &Planned<'_>, kind: u32) -> bool {
    file.attributes.mode & libc::S_IFMT == kind
}

/// What has become of a file's contents, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Put {
    written: u64,
    /// What the disk had no room for.
    missing: u64,
}

impl Put {
    /// Writes pages that follow each other; of one that is valid in parts, these.
    fn pages(&mut self, out: &File, run: &[CachedPage<'_>], size: u64) -> Result<()> {
        let mut bytes = Vec::new();
        let mut start = None;
        for page in run {
            let offset = page.index * PAGE;
            if page.is_valid()? {
                let at = bytes.len();
                bytes.resize(at + usize::try_from(PAGE)?, 0);
                page.kernel().memory().read(page.physical, &mut bytes[at..])?;
                start.get_or_insert(offset);
                continue;
            }
            if let Some(start) = start.take() {
                self.bytes(out, start, &bytes, size)?;
                bytes.clear();
            }
            let mut at = offset;
            for buffer in page.buffers()? {
                if buffer.valid {
                    let mut part = vec![0; usize::try_from(buffer.size)?];
                    page.kernel().read(buffer.data, &mut part)?;
                    self.bytes(out, at, &part, size)?;
                }
                at += buffer.size;
            }
        }
        match start {
            Some(start) => self.bytes(out, start, &bytes, size),
            None => Ok(()),
        }
    }

    /// Writes what is below `size`, page by page where not all of it finds room: some may be where the disk has a
    /// place for it already.
    fn bytes(&mut self, out: &File, offset: u64, bytes: &[u8], size: u64) -> Result<()> {
        let length = usize::try_from(size.saturating_sub(offset).min(bytes.len() as u64))?;
        if write_all(out, &bytes[..length], offset)? {
            self.written += length as u64;
            return Ok(());
        }
        let (mut at, end) = (offset, offset + length as u64);
        while at < end {
            let next = ((at / PAGE + 1) * PAGE).min(end);
            let part = &bytes[usize::try_from(at - offset)?..usize::try_from(next - offset)?];
            let count = if write_all(out, part, at)? { &mut self.written } else { &mut self.missing };
            *count += next - at;
            at = next;
        }
        Ok(())
    }
}

/// Writes bytes, if there is room for all of them.
fn write_all(out: &File, bytes: &[u8], offset: u64) -> Result<bool> {
    match out.write_all_at(bytes, offset) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => Ok(false),
        Err(error) => Err(error).context("cannot write"),
    }
}

/// Makes an empty file of the right kind.
fn make(directory: &OwnedFd, name: &str, file: &Planned<'_>) -> Result<()> {
    let attributes = &file.attributes;
    let mode = Mode::from_raw_mode(attributes.mode & 0o7777);
    match attributes.mode & libc::S_IFMT {
        libc::S_IFDIR => rustix::fs::mkdirat(directory, name, Mode::RWXU)?,
        libc::S_IFLNK => {
            let text = file.contents.link.as_ref().context("it is a symbolic link without a text")?;
            rustix::fs::symlinkat(OsStr::from_bytes(text), directory, name)?;
        }
        kind => {
            // The kernel's own packing of a device's number is not the one that programs know.
            let device = rustix::fs::makedev(attributes.device >> 20, attributes.device & 0xf_ffff);
            rustix::fs::mknodat(directory, name, FileType::from_raw_mode(kind), mode, device)?;
        }
    }
    Ok(())
}

/// Returns the names in a directory, with the numbers of their files.
fn list(directory: &OwnedFd) -> Result<Vec<(Vec<u8>, u64)>> {
    let mut found = Vec::new();
    for entry in rustix::fs::Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            found.push((name.to_vec(), entry.ino()));
        }
    }
    Ok(found)
}

fn inode_number(file: &OwnedFd) -> Result<u64> {
    Ok(rustix::fs::statat(file, "", AtFlags::EMPTY_PATH)?.st_ino)
}

fn link_count(file: &OwnedFd) -> Result<u64> {
    Ok(rustix::fs::statat(file, "", AtFlags::EMPTY_PATH)?.st_nlink)
}

/// Removes a file, or a directory with everything in it; nothing where there is none.
fn remove(directory: &OwnedFd, name: &OsStr) -> Result<()> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => return Ok(()),
        Err(rustix::io::Errno::ISDIR) => {}
        Err(error) => return Err(io::Error::from(error).into()),
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let within = rustix::fs::openat(directory.as_fd(), name, flags, Mode::empty())?;
    for (name, _) in list(&within)? {
        remove(&within, OsStr::from_bytes(&name))?;
    }
    Ok(rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_try_that_has_begun_is_known_by_its_death_until_all_is_finished() {
        let place = std::env::temp_dir().join(format!("orrery-begun-{}", std::process::id()));
        std::fs::create_dir_all(place.join(ASIDE)).unwrap();
        std::fs::write(place.join(ASIDE).join(format!("{BEGUN}1f")), "").unwrap();
        let mounted = Mounted::open(&place).unwrap();
        assert!(has_begun(&mounted, 0x1f) && !has_begun(&mounted, 0x20));
        let modified = || std::fs::metadata(&place).unwrap().modified().unwrap();
        let before = modified();
        finish(&mounted).unwrap();
        assert!(!has_begun(&mounted, 0x1f) && !place.join(ASIDE).exists());
        assert_eq!(modified(), before, "the top directory keeps its times");
        // Where nothing was kept there is nothing to do.
        finish(&mounted).unwrap();
        std::fs::remove_dir_all(&place).unwrap();
    }

    use std::path::Path;

    use orrery_kimage::{Attributes, Name};

    use super::super::plan::Contents;

    /// A file as the dead kernel had it: `kept` is what is to be written.
    fn planned(
        mounted: &Mounted,
        place: &Path,
        name: &str,
        size: u64,
        kept: Vec<(u64, Vec<u8>)>,
    ) -> (u64, Planned<'static>) {
        let flags = OFlags::PATH | OFlags::NOFOLLOW;
        let found = rustix::fs::openat(&mounted.top, name, flags, Mode::empty()).unwrap();
        let number = inode_number(&found).unwrap();
        let own = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(place).unwrap());
        let group = std::os::unix::fs::MetadataExt::gid(&std::fs::metadata(place).unwrap());
        let kind = rustix::fs::statat(&found, "", AtFlags::EMPTY_PATH).unwrap().st_mode;
        let attributes = Attributes {
            number,
            generation: 0,
            mode: kind,
            uid: own,
            gid: group,
            size,
            links: 1,
            device: 0,
            accessed: (1, 0),
            modified: (2, 0),
        };
        let contents = Contents { kept, ..Contents::default() };
        (number, Planned { attributes, found: Some(found), changed: true, extended: None, contents })
    }

    fn plan(files: Vec<(u64, Planned<'static>)>, names: BTreeMap<u64, Vec<Name>>) -> Plan<'static> {
        Plan { files: files.into_iter().collect(), names, unnamed: Vec::new(), death: 7 }
    }

    /// In a file system of so little room that nobody else sees, which goes with the thread.
    fn in_small_room(size: &str, run: impl FnOnce(&Path) + Send + 'static) -> Result<(), rustix::io::Errno> {
        use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
        let size = std::ffi::CString::new(format!("size={size}")).unwrap();
        let place = std::env::temp_dir().join(format!("orrery-room-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        let at = place.clone();
        let thread = std::thread::spawn(move || {
            // SAFETY: of what the thread shares only the tree of mounts is parted, and no descriptors.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }?;
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
            mount("none", &at, "tmpfs", MountFlags::empty(), Some(size.as_c_str()))?;
            run(&at);
            Ok(())
        });
        let result = thread.join().unwrap();
        std::fs::remove_dir(&place).unwrap();
        result
    }

    #[test]
    fn a_disk_without_room_takes_what_it_can_and_all_that_is_missing_is_told() {
        let ran = in_small_room("64k", |place| {
            // One has its place already, one finds none, one finds some.
            std::fs::write(place.join("there"), vec![1; 16 << 10]).unwrap();
            for name in ["small", "large"] {
                std::fs::write(place.join(name), "").unwrap();
            }
            let mounted = Mounted::open(place).unwrap();
            let bytes = |count: usize| vec![(0, vec![2; count])];
            let files = vec![
                planned(&mounted, place, "small", 4096, bytes(4096)),
                planned(&mounted, place, "large", 100 << 10, bytes(100 << 10)),
                planned(&mounted, place, "there", 16 << 10, bytes(16 << 10)),
            ];
            let message = format!("{:#}", apply(&plan(files, BTreeMap::new()), &mounted).unwrap_err());
            let read = |name: &str| std::fs::read(place.join(name)).unwrap();
            let large = read("large").iter().filter(|&&byte| byte == 2).count();
            assert!(large > 0 && large < 60 << 10, "{large} bytes found room");
            let missing = (100 << 10) - large;
            let wanted = format!("the disk is full: {missing} bytes of 1 files are in the dead memory only");
            assert!(message.contains(&wanted), "{message}, where {missing} are missing");
            assert!(
                message.contains(&format!("large lacks {missing};")) && message.contains("--keep"),
                "{message}"
            );
            // What found room is there, and as large as it was.
            assert!(read("there") == vec![2; 16 << 10] && read("small") == vec![2; 4096]);
            assert_eq!(read("large").len(), 100 << 10);
            // Where there is room, the next try ends well.
            let files = vec![planned(&mounted, place, "small", 4096, bytes(4096))];
            std::fs::remove_file(place.join("large")).unwrap();
            assert_eq!(apply(&plan(files, BTreeMap::new()), &mounted).unwrap().counts.bytes, 4096);
        });
        if let Err(error) = ran {
            orrery_testing::skipped!("a full disk: no file system can be mounted: {error}");
        }
    }

    /// Another try takes what is below a file's end for what the file should hold.
    #[test]
    fn a_file_does_not_grow_before_its_contents_are_written() {
        let place = tempfile::tempdir().unwrap();
        let mounted = Mounted::open(place.path()).unwrap();
        // Its size may change, its bytes may not: as if the try ended between both.
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let file: File = rustix::fs::memfd_create("sealed", flags).unwrap().into();
        file.set_len(2500).unwrap();
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::WRITE).unwrap();
        let (_, mut planned) = planned(&mounted, place.path(), ".", 8192, vec![(4096, vec![2; 4096])]);
        planned.attributes.mode = libc::S_IFREG | 0o600;
        planned.found = Some(file.try_clone().unwrap().into());
        let number = inode_number(planned.found.as_ref().unwrap()).unwrap();
        let error = apply(&plan(vec![(number, planned)], BTreeMap::new()), &mounted).unwrap_err();
        assert!(format!("{error:#}").contains("cannot write"), "{error:#}");
        assert_eq!(file.metadata().unwrap().len(), 2500);
    }

    #[test]
    fn a_file_that_has_lost_its_name_is_kept_beside_others_and_told() {
        let place = std::env::temp_dir().join(format!("orrery-lost-{}", std::process::id()));
        let lost = place.join(LOST);
        std::fs::create_dir_all(&lost).unwrap();
        std::fs::write(place.join("moving"), "what it holds").unwrap();
        let mounted = Mounted::open(&place).unwrap();
        let file = planned(&mounted, &place, "moving", 13, Vec::new());
        let number = file.0;
        std::fs::write(lost.join(format!("#{number}")), "somebody's").unwrap();
        // The top directory holds no name of it any more, and it has one by its own account.
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let top = rustix::fs::open(&place, flags, Mode::empty()).unwrap();
        let (_, mut directory) = planned(&mounted, &place, ".", 0, Vec::new());
        directory.found = Some(top);
        let (kept, _) = planned(&mounted, &place, LOST, 0, Vec::new());
        let names = BTreeMap::from([(TOP, vec![Name { name: LOST.into(), number: kept }])]);
        let mut files = vec![file, planned(&mounted, &place, LOST, 0, Vec::new()), (TOP, directory)];
        for (_, planned) in &mut files {
            planned.changed = false;
        }
        let written = apply(&plan(files, names), &mounted).unwrap();
        assert_eq!(std::fs::read(lost.join(format!("#{number}"))).unwrap(), b"somebody's");
        assert_eq!(std::fs::read(lost.join(format!("#{number}.1"))).unwrap(), b"what it holds");
        let wanted = format!("file {number} (13 bytes)");
        let message = written.remarks.join("; ");
        assert!(
            message.contains(&wanted) && message.contains(&format!("lost+found/#{number}.1")),
            "{message}"
        );
        assert!(!place.join("moving").exists() && !place.join(ASIDE).exists());
        std::fs::remove_dir_all(&place).unwrap();
    }
}
