//! Which script the path of a request means.
//!
//! Paths are others' words. They are taken apart and checked here, and then each part is opened in the directory before it without
//! following a symbolic link: none can lead out, whoever changes it meanwhile. openat2(2) could follow those that do not, but a
//! service with `RestrictSUIDSGID=`, as one with a dynamic user has it, may not call it (systemd.exec(5)).

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

/// How the names of scripts end.
const SUFFIX: &[u8] = b".py";
/// The scripts that are served.
#[derive(Debug)]
pub enum Scripts {
    /// One, for every path.
    One {
        /// Where it is, absolute.
        path: PathBuf,
    },
    /// Those below a directory.
    Below {
        /// The directory.
        root: OwnedFd,
        /// Where it is, absolute.
        path: PathBuf,
    },
}

/// A script that a path means.
#[derive(Debug)]
pub struct Found {
    /// The script, open for reading.
    pub script: OwnedFd,
    /// The directory that it is in: for its working directory.
    pub directory: OwnedFd,
    /// Where it is, absolute.
    pub path: PathBuf,
    /// The part of the path that means it (`SCRIPT_NAME`), decoded.
    pub name: Vec<u8>,
    /// The part after that (`PATH_INFO`), decoded.
    pub info: Vec<u8>,
}

impl Scripts {
    /// Serves one script.
    ///
    /// # Errors
    /// Where it is no regular file that can be read.
    pub fn one(path: &Path) -> io::Result<Self> {
        let path = std::path::absolute(path)?;
        let one = Self::One { path };
        match one.find("/")? {
            Some(_) => Ok(one),
            None => Err(io::Error::new(io::ErrorKind::NotFound, "there is no regular file that can be read")),
        }
    }

    /// Serves the scripts below a directory.
    ///
    /// # Errors
    /// As for open(2).
    pub fn below(directory: &Path) -> io::Result<Self> {
        let path = std::path::absolute(directory)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&path, flags, Mode::empty())?;
        Ok(Self::Below { root, path })
    }

    /// Opens the script that the path of a request means, as it stands in the request; `None` if it means none.
    ///
    /// # Errors
    /// What says nothing about the path, such as `EMFILE`.
    pub fn find(&self, path: &str) -> io::Result<Option<Found>> {
        let Some(parts) = parts(path) else { return Ok(None) };
        match self {
            Self::One { path } => {
                let (Some(parent), Some(_)) = (path.parent(), path.file_name()) else { return Ok(None) };
                let opened = open_directory(CWD, parent.as_os_str(), OFlags::empty()).and_then(|directory| {
                    Ok((open_file(CWD, path.as_os_str(), OFlags::empty())?, directory))
                });
                let Some((script, directory)) = regular(opened)? else { return Ok(None) };
                let (path, info) = (path.clone(), joined(&parts));
                Ok(Some(Found { script, directory, path, name: Vec::new(), info }))
            }
            Self::Below { root, path } => {
                let Some(last) = parts.iter().position(|part| part.ends_with(SUFFIX)) else {
                    return Ok(None);
                };
                let (name, info) = parts.split_at(last + 1);
                // Hidden files and directories are not served: they are those of editors and of version control.
                if name.iter().any(|part| part.is_empty() || part.starts_with(b".")) {
                    return Ok(None);
                }
                let Some((script, directory)) = regular(below(root.as_fd(), name))? else { return Ok(None) };
                let path = name.iter().fold(path.clone(), |path, part| path.join(OsStr::from_bytes(part)));
                Ok(Some(Found { script, directory, path, name: joined(name), info: joined(info) }))
            }
        }
    }
}

/// The decoded parts of a path; `None` where one is `.` or `..`, has a slash or a NUL in it, or is not encoded well.
fn parts(path: &str) -> Option<Vec<Vec<u8>>> {
    let part = |text: &str| {
        let decoded = decode(text)?;
        let harmless =
            !decoded.contains(&b'/') && !decoded.contains(&0) && decoded != b"." && decoded != b"..";
        harmless.then_some(decoded)
    };
    path.strip_prefix('/')?.split('/').map(part).collect()
}

/// Undoes the percent-encoding of a part of a path (RFC 3986, section 2.1).
fn decode(text: &str) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    while let Some(byte) = bytes.next() {
        decoded.push(match byte {
            b'%' => digit(bytes.next()?)? << 4 | digit(bytes.next()?)?,
            byte => byte,
        });
    }
    Some(decoded)
}

fn joined(parts: &[Vec<u8>]) -> Vec<u8> {
    parts.iter().flat_map(|part| std::iter::once(b'/').chain(part.iter().copied())).collect()
}

/// Opens a script and the directory that it is in, part by part; none of them is `..` or has a slash in it.
fn below(root: BorrowedFd<'_>, parts: &[Vec<u8>]) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let mut directory = open_directory(root, OsStr::new("."), OFlags::NOFOLLOW)?;
    let (script, directories) = parts.split_last().ok_or(Errno::NOENT)?;
    for part in directories {
        directory = open_directory(&directory, OsStr::from_bytes(part), OFlags::NOFOLLOW)?;
    }
    Ok((open_file(&directory, OsStr::from_bytes(script), OFlags::NOFOLLOW)?, directory))
}

fn open_directory(at: impl AsFd, path: &OsStr, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(at, path, flags | OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

fn open_file(at: impl AsFd, path: &OsStr, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    // Nobody waits for the other end of a FIFO.
    let flags = flags | OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    rustix::fs::openat(at, path, flags, Mode::empty())
}

/// Sorts out what is no regular file that may be read.
fn regular(opened: rustix::io::Result<(OwnedFd, OwnedFd)>) -> io::Result<Option<(OwnedFd, OwnedFd)>> {
    match opened {
        Ok((script, directory)) => {
            let kind = FileType::from_raw_mode(rustix::fs::fstat(&script)?.st_mode);
            Ok((kind == FileType::RegularFile).then_some((script, directory)))
        }
        Err(
            Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS | Errno::NAMETOOLONG | Errno::NXIO,
        ) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use proptest::prelude::*;

    use super::*;

    /// Returns what a path means below a directory: the script's text, `SCRIPT_NAME` and `PATH_INFO`.
    fn found(scripts: &Scripts, path: &str) -> Option<(String, String, String)> {
        let found = scripts.find(path).unwrap()?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let script = io::read_to_string(fs::File::from(found.script)).unwrap();
        Some((script, text(found.name), text(found.info)))
    }

    fn tree() -> (tempfile::TempDir, Scripts) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        fs::create_dir_all(root.join("sub/dir.py")).unwrap();
        fs::create_dir_all(root.join(".git")).unwrap();
        for (name, text) in [
            ("a.py", "a"),
            ("sub/b c.py", "b"),
            ("data.txt", "d"),
            (".hidden.py", "h"),
            (".git/hook.py", "g"),
            ("../secret.py", "s"),
        ] {
            fs::write(root.join(name), text).unwrap();
        }
        symlink("../secret.py", root.join("out.py")).unwrap();
        symlink(directory.path().join("secret.py"), root.join("absolute.py")).unwrap();
        symlink("..", root.join("sub/up")).unwrap();
        symlink("../..", root.join("sub/far")).unwrap();
        symlink("sub/b c.py", root.join("in.py")).unwrap();
        symlink("loop.py", root.join("loop.py")).unwrap();
        rustix::fs::mknodat(CWD, root.join("fifo.py"), FileType::Fifo, Mode::from_raw_mode(0o600), 0)
            .unwrap();
        let scripts = Scripts::below(&root).unwrap();
        (directory, scripts)
    }

    #[test]
    fn paths_mean_scripts_below_the_directory() {
        let (_directory, scripts) = tree();
        for (path, script, name, info) in [
            ("/a.py", "a", "/a.py", ""),
            ("/a.py/", "a", "/a.py", "/"),
            ("/a.py/x/%20y//z.py", "a", "/a.py", "/x/ y//z.py"),
            ("/sub/b%20c.py", "b", "/sub/b c.py", ""),
            ("/%61.py/%0d%0aX:%20y", "a", "/a.py", "/\r\nX: y"),
        ] {
            assert_eq!(found(&scripts, path), Some((script.into(), name.into(), info.into())), "{path}");
        }
    }

    #[test]
    fn paths_do_not_lead_out_of_the_directory() {
        let (_directory, scripts) = tree();
        for path in [
            "/",
            "",
            "*",
            "a.py",
            "//a.py",
            "/sub",
            "/sub/",
            "/sub/dir.py",
            "/data.txt",
            "/none.py",
            "/none/a.py",
            "/data.txt/a.py",
            "/../secret.py",
            "/%2e%2e/secret.py",
            "/sub/../../secret.py",
            "/..%2fsecret.py",
            "/%2E%2E%2Fsecret.py",
            "/./a.py",
            "/a.py/../a.py",
            "/a.py/%2e%2e/x",
            "/a.py/x%2fy",
            "/a.py%00",
            "/a.py/%00",
            "/%00.py",
            "/a.py%",
            "/a.py/%4",
            "/a.py/%zz",
            "/out.py",
            "/in.py",
            "/sub/up/a.py",
            "/absolute.py",
            "/sub/far/secret.py",
            "/loop.py",
            "/fifo.py",
            "/.hidden.py",
            "/.git/hook.py",
            "/%2egit/hook.py",
        ] {
            assert_eq!(found(&scripts, path), None, "{path}");
        }
        let long = format!("/{}.py", "x".repeat(300));
        assert_eq!(found(&scripts, &long), None);
    }

    #[test]
    fn one_script_is_meant_by_every_path() {
        let (directory, _) = tree();
        let scripts = Scripts::one(&directory.path().join("root/data.txt")).unwrap();
        for (path, info) in [("/", "/"), ("/x/y.py", "/x/y.py"), ("/%20", "/ ")] {
            assert_eq!(found(&scripts, path), Some(("d".into(), String::new(), info.into())), "{path}");
        }
        for path in ["/..", "/%2e%2e/x", "/%00", "*"] {
            assert_eq!(found(&scripts, path), None, "{path}");
        }
        assert!(Scripts::one(&directory.path().join("root/sub")).is_err());
        assert!(Scripts::one(&directory.path().join("none")).is_err());
        assert!(Scripts::one(Path::new("/")).is_err());
    }

    proptest! {
        /// What is decoded was encoded.
        #[test]
        fn encoded_bytes_are_decoded(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let encoded: String = bytes.iter().map(|byte| format!("%{byte:02x}")).collect();
            prop_assert_eq!(decode(&encoded), Some(bytes));
        }

        /// No path means what is not below the directory.
        #[test]
        fn no_path_leads_out(words in proptest::collection::vec("\\.\\.|%2e%2e|sub|far|up|/|%2f|secret\\.py|a\\.py|out\\.py|\\.", 0..8)) {
            let (_directory, scripts) = tree();
            for path in [format!("/{}", words.join("/")), format!("/{}", words.concat())] {
                if let Some((text, _, _)) = found(&scripts, &path) {
                    prop_assert_eq!(text, "a", "{}", path);
                }
            }
        }
    }
}
