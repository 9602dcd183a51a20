//! Explains which pages of a process are shared, which are not, and why.
//!
//! What keeps a whole program from sharing (a loader that calls no auditors, filtered system calls) follows from its file, its
//! environment and its state in `/proc`; what keeps one file from being shared follows from the file. The process is neither
//! stopped nor changed, and no store is asked.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::client_file::is_local;
use crate::measure::MappingUsage;

/// The beginning of the names of glibc's loaders.
const GLIBC: &str = "ld-linux";
/// `PT_INTERP` in elf(5).
const INTERPRETER: u32 = 3;
/// `AT_SECURE` in getauxval(3).
const SECURE: u64 = 23;
/// The longest path of a loader.
const MAX_NAME: usize = 4096;

/// The loader that a program's file names.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Loader {
    /// None: the program is linked statically, or is a loader itself.
    None,
    /// The file of this name.
    Named(String),
    /// Unknown: the file is no ELF program of this architecture, such as a script.
    Unknown,
}

fn loader(path: &Path) -> io::Result<Loader> {
    let file = File::open(path)?;
    let mut header = [0; 64];
    if file.read_exact_at(&mut header, 0).is_err() || header[..5] != *b"\x7fELF\x02" {
        return Ok(Loader::Unknown);
    }
    let word = |bytes: &[u8], at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(word)
    };
    let half = |at: usize| u64::from(u16::from_le_bytes([header[at], header[at + 1]]));
    for index in 0..half(56) {
        let mut segment = [0; 56];
        file.read_exact_at(&mut segment, word(&header, 32).saturating_add(index * half(54)))?;
        if segment[..4] == INTERPRETER.to_le_bytes() {
            let length = usize::try_from(word(&segment, 32)).unwrap_or(MAX_NAME).min(MAX_NAME);
            let mut name = vec![0; length];
            file.read_exact_at(&mut name, word(&segment, 8))?;
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            return Ok(Loader::Named(String::from_utf8_lossy(name).into_owned()));
        }
    }
    Ok(Loader::None)
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Returns what in a program's file keeps it from sharing, if there is anything.
///
/// # Errors
/// If the file cannot be read.
pub fn program(path: &Path) -> io::Result<Option<&'static str>> {
    Ok(match loader(path)? {
        // The loader was named on the command line.
        Loader::None if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("ld")) => None,
        Loader::None => Some("the program is linked statically: there is no loader that calls the auditor"),
        Loader::Named(name) if !file_name(&name).starts_with(GLIBC) => {
            Some("the program's loader is not the GNU C library's: it calls no auditor")
        }
        Loader::Named(_) | Loader::Unknown => None,
    })
}

/// What was found out about a process.
#[derive(Clone, Debug)]
pub struct Process {
    /// The path of its root directory.
    root: PathBuf,
    /// The user ID of the process.
    uid: u32,
    /// What keeps all of it from sharing.
    obstacle: Option<&'static str>,
}

impl Process {
    /// Inspects a process.
    ///
    /// # Errors
    /// If there is no such process, or this user may not examine it.
    pub fn inspect(pid: i32) -> io::Result<Self> {
        let directory = PathBuf::from(format!("/proc/{pid}"));
        let status = fs::read_to_string(directory.join("status"))?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let uid = field("Uid:").and_then(|rest| rest.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0);
        let is_filtered = field("Seccomp:").is_some_and(|rest| rest.trim() != "0");
        let environment = fs::read(directory.join("environ"))?;
        let obstacle = match executable(&directory) {
            Some(obstacle) => Some(obstacle),
            None => obstacle(&environment, is_secure(&directory), is_filtered)
                .or_else(|| store_obstacle(&directory, &environment, uid)),
        };
        Ok(Self { root: directory.join("root"), uid, obstacle })
    }

    /// Returns what keeps this process from sharing more, if there is anything.
    pub fn obstacle(&self) -> Option<&'static str> {
        self.obstacle
    }

    /// Returns why the pages of one of its mappings are shared or not.
    pub fn reason(&self, mapping: &MappingUsage) -> &'static str {
        match reason_of_mapping(mapping) {
            Some(reason) => reason,
            None => self.obstacle.or_else(|| self.obstacle_of_file(mapping)).unwrap_or(
                "read-only pages of this very file, not exchanged: no store answered, its quota was used up, or the file came \
                 by dlopen and others still load",
            ),
        }
    }

    /// Returns what keeps the mapping's file from being shared.
    fn obstacle_of_file(&self, mapping: &MappingUsage) -> Option<&'static str> {
        if file_name(&mapping.name) == orrery_orc_auditor::NAME {
            return Some("the auditor: one file for all programs that share");
        }
        let gone =
            Some("the file is no longer there under its name: what it was stays, and nobody else has it");
        // The path is valid below the root directory of the process, or below that of this one.
        let paths = [self.root.join(mapping.name.trim_start_matches('/')), mapping.name.clone().into()];
        let is_it =
            |path: &PathBuf| Some(fs::metadata(path).ok()?).filter(|found| found.ino() == mapping.inode);
        let Some((path, found)) = paths.iter().find_map(|path| Some((path, is_it(path)?))) else {
            return gone;
        };
        let Ok(file) = File::open(path) else {
            return Some("the file cannot be read, only run");
        };
        if !is_local(file.as_fd()) {
            return Some(
                "the file's system may never answer (FUSE, network): the store does not read from there",
            );
        }
        let mut magic = [0; 4];
        if file.read_exact_at(&mut magic, 0).is_err() || magic != *b"\x7fELF" {
            return Some("data that the program mapped by itself: it may have them by orc_open");
        }
        if found.mode() & 0o022 != 0 {
            return Some(
                "others may write the file: the store's policy takes code only from files that they cannot",
            );
        }
        (found.uid() != 0 && found.uid() != self.uid).then_some(
            "the file is another user's: the store's policy takes code from root's and one's own only",
        )
    }
}

fn executable(directory: &Path) -> Option<&'static str> {
    let path = directory.join("exe");
    // The link's own name is always `exe`.
    let is_loader = fs::read_link(&path).is_ok_and(|to| file_name(&to.to_string_lossy()).starts_with("ld"));
    if is_loader { None } else { program(&path).ok().flatten() }
}

fn is_secure(directory: &Path) -> bool {
    let vector = fs::read(directory.join("auxv")).unwrap_or_default();
    let (words, _) = vector.as_chunks::<8>();
    let (pairs, _) = words.as_chunks::<2>();
    pairs.iter().any(|[key, value]| u64::from_ne_bytes(*key) == SECURE && u64::from_ne_bytes(*value) != 0)
}

fn variable<'a>(environment: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let mut variables = environment.split(|byte| *byte == 0);
    variables.find_map(|variable| variable.strip_prefix(name)).filter(|value| !value.is_empty())
}

/// Returns why a program of this user does not trust the store, if it does not.
fn store_obstacle(directory: &Path, environment: &[u8], uid: u32) -> Option<&'static str> {
    use std::os::unix::ffi::OsStrExt as _;

    let named = Path::new(std::ffi::OsStr::from_bytes(variable(environment, b"ORRERY_ORC=")?));
    let socket = directory.join("root").join(named.strip_prefix("/").ok()?).join(orrery_orc_wire::SOCKET);
    let Ok(socket) = fs::metadata(socket) else {
        return Some("there is no store in the directory that ORRERY_ORC names");
    };
    let owner = uid_in_namespace(&fs::read_to_string(directory.join("uid_map")).ok()?, socket.uid());
    let own = uid_in_namespace(&fs::read_to_string(directory.join("uid_map")).ok()?, uid);
    match owner {
        None => Some(
            "the program lives in a user namespace in which the store's user has no number: it cannot tell whose the store is",
        ),
        Some(owner) if owner != 0 && Some(owner) != own => Some("the store belongs to another user"),
        Some(_) => None,
    }
}

/// Returns the UID of a user in a user namespace, by its `uid_map` as seen from here (user_namespaces(7)).
fn uid_in_namespace(map: &str, uid: u32) -> Option<u32> {
    map.lines().find_map(|line| {
        let mut numbers = line.split_whitespace().map(|word| word.parse::<u32>().ok());
        let (inside, outside, length) = (numbers.next()??, numbers.next()??, numbers.next()??);
        let skip = uid.checked_sub(outside).filter(|skip| *skip < length)?;
        inside.checked_add(skip)
    })
}

/// Returns what keeps a program with this environment from sharing.
fn obstacle(environment: &[u8], is_secure: bool, is_filtered: bool) -> Option<&'static str> {
    let value = |name| variable(environment, name);
    let auditors = value(b"LD_AUDIT=").map(String::from_utf8_lossy).unwrap_or_default();
    let has_auditor = auditors.split(':').any(|path| file_name(path) == orrery_orc_auditor::NAME);
    if !has_auditor || value(b"ORRERY_ORC=").is_none() {
        return Some("the program was not started by `orrery orc run`, nor with its variables");
    }
    if is_secure {
        return Some(
            "the program has more rights than who started it (set-user-id, capabilities): the loader calls no auditor",
        );
    }
    if is_filtered && value(b"ORRERY_ORC_SECCOMP=") != Some(b"share") {
        return Some(
            "the program's system calls are filtered (seccomp): nothing is tried, unless --filtered says that sockets are \
             allowed",
        );
    }
    None
}

/// Returns the reason, if it follows from the mapping alone.
fn reason_of_mapping(mapping: &MappingUsage) -> Option<&'static str> {
    let access = mapping.access.as_bytes();
    let has = |index: usize, letter: u8| access.get(index) == Some(&letter);
    let (writable, executable, shared) = (has(1, b'w'), has(2, b'x'), has(3, b's'));
    Some(match mapping.name.as_str() {
        _ if mapping.is_object() && writable => "writable data: pages are copied when they are written",
        _ if mapping.is_object() && executable && mapping.anonymous > 0 => {
            "code that was changed in memory (text relocations, patches, breakpoints)"
        }
        _ if mapping.is_object() && mapping.anonymous > 0 => {
            "read-only after relocation: pointers in it depend on load addresses"
        }
        _ if mapping.is_object() => "an object: one copy for all",
        "[stack]" => "the stack: written all the time",
        "[heap]" => "the heap: written all the time",
        "[vdso]" | "[vvar]" | "[vvar_vclock]" | "[vsyscall]" => "the kernel's, the same for all",
        _ if shared => "shared memory already",
        _ if mapping.inode == 0 && writable && executable => "writable and executable: its bytes may change",
        _ if mapping.inode == 0 && writable => "memory without a file: written by the program",
        _ if mapping.inode == 0 && executable => "code that the program made; it may register and publish it",
        _ if mapping.inode == 0 && mapping.resident == 0 => "reserved, nothing there",
        _ if mapping.inode == 0 => "read-only memory without a file; the program may publish it",
        _ if writable && executable => "writable and executable: its bytes may change",
        _ if writable => "writable data: pages are copied when they are written",
        _ if mapping.anonymous > 0 && executable => {
            "code that was changed in memory (text relocations, patches, breakpoints)"
        }
        _ if mapping.anonymous > 0 => "read-only after relocation: pointers in it depend on load addresses",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(name: &str, access: &str, inode: u64, anonymous: u64) -> MappingUsage {
        MappingUsage {
            name: name.to_owned(),
            access: access.to_owned(),
            inode,
            anonymous,
            ..MappingUsage::default()
        }
    }

    #[test]
    fn mappings_tell_by_themselves() {
        let object = |access: &str, anonymous| {
            reason_of_mapping(&mapping("/memfd:orc:0123456789abcdef (deleted)", access, 77, anonymous))
                .unwrap()
        };
        assert!(
            object("r-xp", 0).contains("one copy") && object("rw-p", 0).contains("when they are written")
        );
        assert!(object("r-xp", 4096).contains("breakpoints") && object("r--p", 4096).contains("relocation"));
        assert!(reason_of_mapping(&mapping("", "rw-p", 0, 4096)).unwrap().contains("written"));
        assert!(
            reason_of_mapping(&mapping("/packed", "rwxp", 5, 0)).unwrap().contains("writable and executable")
        );
        assert_eq!(reason_of_mapping(&mapping("/lib/libc.so.6", "r-xp", 5, 0)), None);
    }

    #[test]
    fn programs_are_told_apart() {
        let own = std::env::current_exe().unwrap();
        assert!(matches!(loader(&own).unwrap(), Loader::Named(name) if file_name(&name).starts_with(GLIBC)));
        assert_eq!(program(&own).unwrap(), None);
        assert_eq!(loader(Path::new("/etc/passwd")).unwrap(), Loader::Unknown);
        assert!(loader(Path::new("/nonexistent")).is_err());
        let directory = tempfile::tempdir().unwrap();
        let edited = |name: &str, edit: &dyn Fn(&mut Vec<u8>, usize)| {
            let mut bytes = fs::read(&own).unwrap();
            let at = bytes.windows(GLIBC.len()).position(|part| part == GLIBC.as_bytes()).unwrap();
            edit(&mut bytes, at);
            let path = directory.path().join(name);
            fs::write(&path, bytes).unwrap();
            path
        };
        let other = edited("musl", &|bytes, at| bytes[at..at + GLIBC.len()].copy_from_slice(b"ld-other"));
        assert!(program(&other).unwrap().unwrap().contains("not the GNU C library's"));
        let none = edited("static", &|bytes, _| bytes[56..58].fill(0));
        assert!(program(&none).unwrap().unwrap().contains("statically"));
        // Headers that lead nowhere are an error, and no end of the world.
        let astray = edited("astray", &|bytes, _| bytes[32..40].fill(0xff));
        assert!(program(&astray).is_err());
    }

    #[test]
    fn programs_are_left_alone_for_reasons() {
        let started =
            format!("A=b\0LD_AUDIT=/x/other.so:/run/{}\0ORRERY_ORC=/run\0", orrery_orc_auditor::NAME);
        let started = started.as_bytes();
        assert_eq!(obstacle(started, false, false), None);
        assert!(obstacle(b"LD_AUDIT=\0ORRERY_ORC=/run\0", false, false).unwrap().contains("orrery orc run"));
        assert!(obstacle(started, true, false).unwrap().contains("set-user-id"));
        assert!(obstacle(started, false, true).unwrap().contains("seccomp"));
        let willing = [started, b"ORRERY_ORC_SECCOMP=share\0"].concat();
        assert_eq!(obstacle(&willing, false, true), None);
    }

    #[test]
    fn users_have_other_numbers_in_their_namespaces() {
        assert_eq!(uid_in_namespace("         0          0 4294967295\n", 1000), Some(1000));
        let map = "0 100000 1000\n5000 1000 1\n";
        assert_eq!((uid_in_namespace(map, 100_999), uid_in_namespace(map, 1000)), (Some(999), Some(5000)));
        assert_eq!(
            (uid_in_namespace(map, 0), uid_in_namespace(map, 101_000), uid_in_namespace("nonsense", 0)),
            (None, None, None)
        );
    }

    #[test]
    fn this_process_was_not_started_so() {
        let own = Process::inspect(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert!(own.obstacle().unwrap().contains("not started"));
        assert!(Process::inspect(i32::MAX).is_err());
    }
}
