//! Checks of a program before it is started, so that errors are reported before anything happened.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// As much as the kernel looks at.
const HEAD: usize = 256;
const EM_X86_64: u16 = 62;
const SET_USER_ID: u32 = 0o4000;
const SET_GROUP_ID: u32 = 0o2010;
/// A script's interpreter may be a script: so often.
const INTERPRETERS: usize = 5;

/// Finds the program that a shell would start, and checks that an executive can be put under it. `seen` says where the kernel
/// has what the program sees at a path.
///
/// # Errors
/// Why it cannot be executed, or not with an executive.
pub(crate) fn find(name: &OsStr, seen: &dyn Fn(&Path) -> PathBuf) -> Result<PathBuf> {
    let program = in_path(name, seen)?;
    let mut file = program.clone();
    for _ in 0..=INTERPRETERS {
        match interpreter(&file, &seen(&file))? {
            Some(next) => file = next,
            None => return Ok(program),
        }
    }
    Err(Error::NotExecutable { program, source: io::Error::from_raw_os_error(libc::ELOOP) })
}

fn in_path(name: &OsStr, seen: &dyn Fn(&Path) -> PathBuf) -> Result<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Ok(PathBuf::from(name));
    }
    let path = env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let mut candidates = env::split_paths(&path).map(|directory| directory.join(name));
    let found = candidates.find(|candidate| {
        let candidate = seen(candidate);
        candidate.is_file() && executable(&candidate).is_ok()
    });
    found.filter(|_| !name.is_empty()).ok_or_else(|| Error::NotFound(PathBuf::from(name)))
}

fn executable(program: &Path) -> io::Result<()> {
    Ok(rustix::fs::access(program, rustix::fs::Access::EXEC_OK)?)
}

/// Checks one file, which the kernel has at `place`; the interpreter, if it is a script.
fn interpreter(program: &Path, place: &Path) -> Result<Option<PathBuf>> {
    let refused = |source| Error::NotExecutable { program: program.to_owned(), source };
    let status = fs::metadata(place).map_err(refused)?;
    if status.is_dir() {
        return Err(refused(io::Error::from_raw_os_error(libc::EISDIR)));
    }
    executable(place).map_err(refused)?;
    let mut head = Vec::new();
    match File::open(place) {
        Ok(file) => {
            file.take(HEAD as u64).read_to_end(&mut head).map_err(refused)?;
        }
        // What may be executed, but not read, is for the kernel to judge.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(None),
        Err(error) => return Err(refused(error)),
    }
    if let Some(line) = head.strip_prefix(b"#!") {
        let mut words = line.split(|byte| b" \t\n\0".contains(byte)).filter(|word| !word.is_empty());
        let named = words.next().map(|word| PathBuf::from(OsStr::from_bytes(word)));
        return named.map(Some).ok_or_else(|| Error::NotAProgram(program.to_owned()));
    }
    let Some(machine) = machine(&head) else {
        return Err(Error::NotAProgram(program.to_owned()));
    };
    if machine != (2, EM_X86_64) {
        return Err(Error::Foreign { program: program.to_owned(), machine: name_of(machine) });
    }
    let gains = status.mode() & SET_USER_ID != 0 || status.mode() & SET_GROUP_ID == SET_GROUP_ID;
    if (gains || has_capabilities(place)) && !is_root() {
        return Err(Error::Privileged(program.to_owned()));
    }
    Ok(None)
}

/// Interpreter and its argument, of the script that the kernel has at `place`.
pub(crate) fn script(place: &Path) -> Option<(PathBuf, Option<OsString>)> {
    let mut head = Vec::new();
    File::open(place).ok()?.take(HEAD as u64).read_to_end(&mut head).ok()?;
    let line = head.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?.trim_ascii();
    let end = line.iter().position(|byte| b" \t".contains(byte)).unwrap_or(line.len());
    let (interpreter, argument) = line.split_at_checked(end)?;
    let argument = argument.trim_ascii();
    let argument = (!argument.is_empty()).then(|| OsStr::from_bytes(argument).to_owned());
    Some((PathBuf::from(OsStr::from_bytes(interpreter)), argument))
}

/// Class and machine of an ELF file.
fn machine(head: &[u8]) -> Option<(u8, u16)> {
    let header = head.strip_prefix(b"\x7fELF")?;
    let bytes = [*head.get(18)?, *head.get(19)?];
    let machine = if head[5] == 2 { u16::from_be_bytes(bytes) } else { u16::from_le_bytes(bytes) };
    Some((*header.first()?, machine))
}

fn name_of((class, machine): (u8, u16)) -> String {
    match (class, machine) {
        (_, 3) => "i386".to_owned(),
        (1, EM_X86_64) => "x32".to_owned(),
        (_, 40) => "32-bit ARM".to_owned(),
        (_, 183) => "aarch64".to_owned(),
        (_, 243) => "RISC-V".to_owned(),
        (_, 21) => "64-bit PowerPC".to_owned(),
        (_, 22) => "s390".to_owned(),
        (_, other) => format!("ELF machine {other}"),
    }
}

fn has_capabilities(program: &Path) -> bool {
    // Version 3 of the attribute, the longest, has 24 bytes.
    rustix::fs::getxattr(program, c"security.capability", &mut [0_u8; 64]).is_ok_and(|length| length > 0)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn find(name: &OsStr) -> Result<PathBuf> {
        super::find(name, &Path::to_owned)
    }

    fn file(directory: &Path, bytes: &[u8], mode: u32) -> PathBuf {
        let path = directory.join("program");
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    fn elf(class: u8, machine: u16) -> Vec<u8> {
        let mut bytes = b"\x7fELF".to_vec();
        bytes.extend([class, 1]);
        bytes.resize(18, 0);
        bytes.extend(machine.to_le_bytes());
        bytes.resize(64, 0);
        bytes
    }

    #[test]
    fn programs_are_told_from_what_is_none() {
        let directory = tempfile::tempdir().unwrap();
        let find = |bytes: &[u8], mode| find(file(directory.path(), bytes, mode).as_os_str());
        assert!(find(&elf(2, EM_X86_64), 0o755).is_ok());
        assert!(matches!(find(&elf(1, 3), 0o755), Err(Error::Foreign { machine, .. }) if machine == "i386"));
        assert!(
            matches!(find(&elf(2, 183), 0o755), Err(Error::Foreign { machine, .. }) if machine == "aarch64")
        );
        assert!(matches!(find(b"text", 0o755), Err(Error::NotAProgram(_))));
        assert!(matches!(find(b"", 0o755), Err(Error::NotAProgram(_))));
        assert!(matches!(find(&elf(2, EM_X86_64), 0o644), Err(Error::NotExecutable { .. })));
        assert!(find(b"#! /bin/sh -e\n", 0o755).is_ok());
        assert!(matches!(find(b"#!/nowhere/sh\n", 0o755), Err(Error::NotExecutable { .. })));
    }

    #[test]
    fn a_script_that_interprets_itself_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("program");
        let text = format!("#!{}\n", path.display());
        assert!(matches!(
            find(file(directory.path(), text.as_bytes(), 0o755).as_os_str()),
            Err(Error::NotExecutable { .. })
        ));
    }

    #[test]
    fn names_are_looked_for_in_path() {
        assert!(find(OsStr::new("sh")).unwrap().is_absolute());
        assert!(matches!(find(OsStr::new("no-such-program")), Err(Error::NotFound(_))));
        assert!(matches!(find(OsStr::new("")), Err(Error::NotFound(_))));
        assert!(matches!(find(OsStr::new("/tmp")), Err(Error::NotExecutable { .. })));
    }
}
