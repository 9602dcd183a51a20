//! A program that does everything to files that can be done, remembers it, and compares.
//!
//! It is what tests let a kernel die under. It knows from its own memory what each file must hold; when it finds itself
//! under another kernel (the boot's identity has changed), it compares every file with that, tells the verdict in a file,
//! and goes on. What it was just doing when the kernel died may have happened or not: that one file is not judged.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context as _, Result};

const BOOT: &str = "/proc/sys/kernel/random/boot_id";
const MOST_FILES: usize = 60;
const MOST_BYTES: u64 = 300_000;
/// The most names, and bytes in all files together: what it remembers must fit beside a service in a small machine, however
/// long it runs.
const MOST_NAMES: usize = 600;
const MOST_ALL: u64 = 16 << 20;

/// What a file must be.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    File(Vec<u8>),
    Link(String),
    Directory,
}

#[derive(Clone, Debug)]
struct Expected {
    kind: Kind,
    mode: u32,
    owner: u32,
    /// In seconds, where it was set.
    time: Option<u64>,
    /// What was attached to it as `user.note`.
    note: Option<Vec<u8>>,
    /// Its access list, as long as its permissions were not set since.
    list: Option<Vec<u8>>,
}

const NOTE: &str = "user.note";
const LIST: &str = "system.posix_acl_access";

/// Returns what is attached to a file under a name.
fn attached(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = Vec::with_capacity(4096);
    rustix::fs::lgetxattr(path, name, rustix::buffer::spare_capacity(&mut value)).ok()?;
    Some(value)
}

/// An access list that grants what `mode` does, and to one more user to read.
fn access_list(mode: u32) -> Vec<u8> {
    const EACH: [(u16, u32); 5] = [(1, 6), (2, 0), (4, 3), (0x10, 3), (0x20, 0)];
    let mut list = 2_u32.to_le_bytes().to_vec();
    for (tag, shift) in EACH {
        let (rights, who) = if tag == 2 { (4, 4711) } else { (mode >> shift & 7, u32::MAX) };
        list.extend_from_slice(&tag.to_le_bytes());
        list.extend_from_slice(&u16::try_from(rights).unwrap_or(0).to_le_bytes());
        list.extend_from_slice(&who.to_le_bytes());
    }
    list
}

/// xorshift64*: the same numbers on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) % end.max(1)
    }

    fn bytes(&mut self, length: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < length {
            bytes.extend_from_slice(&self.below(1 << 52).to_le_bytes());
        }
        bytes.truncate(usize::try_from(length).unwrap_or(0));
        bytes
    }
}

struct Scribbler {
    directory: PathBuf,
    /// A file without a name, and what it holds.
    nameless: (File, Vec<u8>),
    random: Random,
    /// By the path below the directory.
    expected: BTreeMap<String, Expected>,
    /// The names that the operation under way is about.
    busy: Vec<String>,
    count: u64,
}

/// Scribbles in `directory` for ever. Why it ended, should it, is left in place of a verdict.
pub(crate) fn run(directory: &Path, seed: u64) -> Result<()> {
    let ended = scribble(directory, seed);
    if let Err(error) = &ended {
        crate::verdict::leave(&format!("ended: {error:#}\n"))?;
    }
    ended
}

/// Does it once more as long as it was interrupted, as the call under way is when its kernel dies.
fn undisturbed<T>(mut what: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match what() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

fn scribble(directory: &Path, seed: u64) -> Result<()> {
    let place = directory.join("scribbled");
    fs::create_dir_all(&place).with_context(|| format!("cannot create {}", place.display()))?;
    let path = place.join("nameless");
    let nameless = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
    fs::remove_file(path)?;
    let mut scribbler = Scribbler {
        directory: place,
        nameless: (nameless, Vec::new()),
        random: Random(seed | 1),
        expected: BTreeMap::new(),
        busy: Vec::new(),
        count: 0,
    };
    scribbler.fill().context("the file without a name")?;
    let mut boot = fs::read_to_string(BOOT)?;
    loop {
        let name = scribbler.pick();
        scribbler.busy = vec![name.clone()];
        let result = scribbler.step(&name);
        let now = fs::read_to_string(BOOT)?;
        if now != boot {
            boot = now;
            let verdict = scribbler.compare().context("comparing")?;
            crate::verdict::leave(&verdict)?;
            undisturbed(|| scribbler.forget()).context("removing what was being changed")?;
            undisturbed(|| scribbler.fill()).context("the file without a name")?;
        } else {
            result.with_context(|| format!("operation {} on {name}", scribbler.count))?;
        }
        if scribbler.count.is_multiple_of(16) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Scribbler {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Gives the file without a name other contents, some of which are forced to the disk, and a hole.
    fn fill(&mut self) -> io::Result<()> {
        let (file, content) = (&self.nameless.0, self.random.bytes(100_000));
        file.set_len(0)?;
        file.write_all_at(&content, 0)?;
        file.sync_all()?;
        file.write_all_at(&content[..7000], 150_000)?;
        let mut whole = content.clone();
        whole.resize(150_000, 0);
        whole.extend_from_slice(&content[..7000]);
        self.nameless.1 = whole;
        Ok(())
    }

    /// Returns a name, of a file that exists or not, at the top or in a directory.
    fn pick(&mut self) -> String {
        let number = self.random.below(MOST_FILES as u64);
        let directories: Vec<&String> =
            self.expected.iter().filter(|(_, e)| e.kind == Kind::Directory).map(|(name, _)| name).collect();
        match directories.get(usize::try_from(self.random.0 >> 40).unwrap_or(0) % (directories.len() + 1)) {
            Some(directory) => format!("{directory}/f{number}"),
            None => format!("f{number}"),
        }
    }

    fn step(&mut self, name: &str) -> io::Result<()> {
        self.count += 1;
        let path = self.path(name);
        let Some(known) = self.expected.get(name).cloned() else { return self.make(name, &path) };
        match (known.kind, self.random.below(20)) {
            (Kind::File(_), 0..8) if self.total() > MOST_ALL => {
                fs::remove_file(&path)?;
                self.expected.remove(name);
                Ok(())
            }
            (Kind::File(mut content), 0..8) => {
                // Append or overwrite; sometimes beyond the end, which leaves a hole.
                let most = (content.len() as u64 + 9000).min(MOST_BYTES);
                let at =
                    if self.random.below(2) == 0 { content.len() as u64 } else { self.random.below(most) };
                let length = 1 + self.random.below(20_000);
                let bytes = self.random.bytes(length);
                let file = OpenOptions::new().write(true).open(&path)?;
                file.write_all_at(&bytes, at)?;
                if self.random.below(600) == 0 {
                    file.sync_all()?;
                }
                let (start, end) =
                    (usize::try_from(at).unwrap_or(0), usize::try_from(at).unwrap_or(0) + bytes.len());
                content.resize(content.len().max(end), 0);
                content[start..end].copy_from_slice(&bytes);
                self.update(name, Kind::File(content))
            }
            (Kind::File(mut content), 8..10) => {
                let length = self.random.below(content.len() as u64 + 5000);
                OpenOptions::new().write(true).open(&path)?.set_len(length)?;
                content.resize(usize::try_from(length).unwrap_or(0), 0);
                self.update(name, Kind::File(content))
            }
            (Kind::Directory, 0..10) => Ok(()),
            (Kind::Directory, 13..15) => {
                let within = format!("{name}/");
                if self.expected.range(within.clone()..).next().is_some_and(|(n, _)| n.starts_with(&within)) {
                    return Ok(());
                }
                fs::remove_dir(&path)?;
                self.expected.remove(name);
                Ok(())
            }
            (_, 10..13) => {
                let mode = 0o600 | u32::try_from(self.random.below(0o200)).unwrap_or(0);
                if self.expected.get(name).is_some_and(|known| matches!(known.kind, Kind::Link(_))) {
                    return Ok(());
                }
                if self.random.below(2) == 0 {
                    return self.attach(name, &path);
                }
                fs::set_permissions(&path, fs::Permissions::from_mode(mode | 0o100))?;
                let owner = u32::try_from(self.random.below(5000)).unwrap_or(0);
                std::os::unix::fs::chown(&path, Some(owner), None)?;
                if let Some(known) = self.expected.get_mut(name) {
                    (known.mode, known.owner, known.list) = (mode | 0o100, owner, None);
                }
                Ok(())
            }
            (Kind::File(_), 13..15) => {
                let seconds = 1_000_000_000 + self.random.below(500_000_000);
                File::open(&path)?.set_modified(UNIX_EPOCH + Duration::from_secs(seconds))?;
                if let Some(known) = self.expected.get_mut(name) {
                    known.time = Some(seconds);
                }
                Ok(())
            }
            (Kind::File(_) | Kind::Link(_), 15..17) => {
                fs::remove_file(&path)?;
                self.expected.remove(name);
                Ok(())
            }
            _ => self.rename(name, &path),
        }
    }

    /// A note, short enough for the inode or too long for it, or an access list; or takes the note away.
    fn attach(&mut self, name: &str, path: &Path) -> io::Result<()> {
        let length = self.random.below(500);
        let note = self.random.bytes(length);
        let choice = self.random.below(4);
        let Some(known) = self.expected.get_mut(name) else { return Ok(()) };
        let flags = rustix::fs::XattrFlags::empty();
        match choice {
            0 if known.note.take().is_some() => rustix::fs::removexattr(path, NOTE)?,
            1 => {
                let list = access_list(known.mode);
                rustix::fs::setxattr(path, LIST, &list, flags)?;
                known.list = Some(list);
            }
            _ => {
                rustix::fs::setxattr(path, NOTE, &note, flags)?;
                known.note = Some(note);
            }
        }
        Ok(())
    }

    /// Bytes in all files.
    fn total(&self) -> u64 {
        self.expected.values().map(|known| known.kind.length()).sum()
    }

    fn make(&mut self, name: &str, path: &Path) -> io::Result<()> {
        if self.expected.len() >= MOST_NAMES {
            return Ok(());
        }
        let (kind, mode) = match self.random.below(8) {
            0 if !name.contains('/') => {
                fs::create_dir(path)?;
                (Kind::Directory, 0o755)
            }
            1 => {
                let text = "x".repeat(1 + usize::try_from(self.random.below(120)).unwrap_or(0));
                std::os::unix::fs::symlink(&text, path)?;
                (Kind::Link(text), 0o777)
            }
            _ => {
                let length = self.random.below(30_000);
                let bytes = self.random.bytes(length);
                fs::write(path, &bytes)?;
                fs::set_permissions(path, fs::Permissions::from_mode(0o644))?;
                (Kind::File(bytes), 0o644)
            }
        };
        let expected = Expected { kind, mode, owner: 0, time: None, note: None, list: None };
        self.expected.insert(name.to_owned(), expected);
        Ok(())
    }

    /// Over another file or to a new name; of a directory, with all that is in it.
    fn rename(&mut self, name: &str, path: &Path) -> io::Result<()> {
        let target = self.pick();
        let is_directory = self.expected.get(name).is_some_and(|known| known.kind == Kind::Directory);
        let over = self.expected.get(&target).map(|known| known.kind == Kind::Directory);
        if target == name || over == Some(true) || (is_directory && (over.is_some() || target.contains('/')))
        {
            return Ok(());
        }
        self.busy.push(target.clone());
        if over.is_none() && !is_directory && self.random.below(3) == 0 {
            fs::hard_link(path, self.path(&target))?;
            fs::remove_file(path)?;
        } else {
            fs::rename(path, self.path(&target))?;
        }
        let within = format!("{name}/");
        let moved: Vec<String> =
            self.expected.keys().filter(|key| *key == name || key.starts_with(&within)).cloned().collect();
        for key in moved {
            if let Some(known) = self.expected.remove(&key) {
                self.expected.insert(format!("{target}{}", &key[name.len()..]), known);
            }
        }
        Ok(())
    }

    fn update(&mut self, name: &str, kind: Kind) -> io::Result<()> {
        if let Some(known) = self.expected.get_mut(name) {
            known.kind = kind;
            known.time = None;
        }
        Ok(())
    }

    fn is_busy(&self, path: &str) -> bool {
        self.busy.iter().any(|name| {
            path.strip_prefix(name.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    }

    /// Returns what is wrong, or that nothing is. What was just being done is not judged.
    fn compare(&self) -> Result<String> {
        let mut wrong = Vec::new();
        let (nameless, content) = &self.nameless;
        let mut found = vec![0; content.len()];
        nameless.read_exact_at(&mut found, 0).context("the file without a name")?;
        if nameless.metadata()?.len() != content.len() as u64 || found != *content {
            wrong.push("the file without a name holds something else".to_owned());
        }
        let mut there = BTreeSet::new();
        collect(&self.directory, "", &mut there)?;
        for (path, known) in &self.expected {
            if self.is_busy(path) {
                continue;
            }
            // One after the other: all of them together would take as much memory once more.
            match there.contains(path).then(|| look_at(&self.path(path))).transpose().context(path.clone())? {
                None => wrong.push(format!("{path} is missing")),
                Some(found) => {
                    if found.kind != known.kind {
                        wrong.push(format!("{path}: {}", differ(&found.kind, &known.kind)));
                    }
                    let is_link = matches!(known.kind, Kind::Link(_));
                    if !is_link && (found.mode, found.owner) != (known.mode, known.owner) {
                        wrong.push(format!(
                            "{path}: mode {:o} owner {}, not {:o} {}",
                            found.mode, found.owner, known.mode, known.owner
                        ));
                    }
                    if found.note != known.note {
                        let length = |note: &Option<Vec<u8>>| note.as_ref().map(Vec::len);
                        let (found, known) = (length(&found.note), length(&known.note));
                        wrong.push(format!("{path}: a note of {found:?} bytes, not {known:?}"));
                    }
                    if known.list.is_some() && found.list != known.list {
                        wrong.push(format!("{path}: access list {:?}, not {:?}", found.list, known.list));
                    }
                    if known.time.is_some() && found.time != known.time {
                        wrong.push(format!("{path}: time {:?}, not {:?}", found.time, known.time));
                    }
                }
            }
        }
        for path in there.iter().filter(|path| !self.expected.contains_key(*path)) {
            if !self.is_busy(path) {
                wrong.push(format!("{path} should not be there"));
            }
        }
        let total = self.total();
        let sum = format!("{} operations, {} names, {total} bytes", self.count, self.expected.len());
        Ok(if wrong.is_empty() {
            format!("right: {sum}\n")
        } else {
            format!("wrong: {sum}\n{}\n", wrong.join("\n"))
        })
    }

    /// Removes what cannot be known, with all that is below it.
    fn forget(&mut self) -> io::Result<()> {
        for name in &self.busy {
            let path = self.directory.join(name);
            match fs::symlink_metadata(&path) {
                Ok(about) if about.is_dir() => fs::remove_dir_all(&path)?,
                Ok(_) => fs::remove_file(&path)?,
                Err(_) => {}
            }
        }
        let busy: Vec<String> = self.expected.keys().filter(|path| self.is_busy(path)).cloned().collect();
        busy.iter().for_each(|path| drop(self.expected.remove(path)));
        Ok(())
    }
}

impl Kind {
    fn length(&self) -> u64 {
        if let Self::File(content) = self { content.len() as u64 } else { 0 }
    }
}

fn differ(found: &Kind, known: &Kind) -> String {
    match (found, known) {
        (Kind::File(found), Kind::File(known)) => {
            let differ = |at: &usize| found[*at] != known[*at];
            let common = 0..found.len().min(known.len());
            let (first, last) = (common.clone().find(differ), common.rev().find(differ));
            let zeros =
                first.zip(last).is_some_and(|(first, last)| found[first..=last].iter().all(|b| *b == 0));
            format!(
                "{} bytes, not {}; first and last difference at {first:?} and {last:?}{}",
                found.len(),
                known.len(),
                if zeros { ", zeros" } else { "" }
            )
        }
        _ => "another kind of file, or link".to_owned(),
    }
}

/// The names of all that is below a directory.
fn collect(directory: &Path, prefix: &str, into: &mut BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.metadata()?.is_dir() {
            collect(&entry.path(), &format!("{name}/"), into)?;
        }
        into.insert(name);
    }
    Ok(())
}

/// Returns what stands under a name.
fn look_at(path: &Path) -> io::Result<Expected> {
    let about = fs::symlink_metadata(path)?;
    let kind = if about.is_dir() {
        Kind::Directory
    } else if about.is_symlink() {
        Kind::Link(fs::read_link(path)?.to_string_lossy().into_owned())
    } else {
        Kind::File(fs::read(path)?)
    };
    let time = u64::try_from(about.mtime()).ok();
    let (mode, owner) = (about.mode() & 0o7777, about.uid());
    Ok(Expected { kind, mode, owner, time, note: attached(path, NOTE), list: attached(path, LIST) })
}
