//! What is known of system calls: names, arguments, which of these are paths, descriptors, buffers.
//!
//! The table comes from the kernel itself (tracefs; `calls/generate` makes it), the meaning of an argument from its type
//! and name there.

mod groups;

use std::sync::OnceLock;

use orrery_hijack_image::nr::CALLS;
use orrery_hijack_image::policy::{NO_ARGUMENT, Shape};
use syscalls::Sysno;

pub use groups::{group, no_such_call};

static TABLE: &str = include_str!("../calls/table");

/// A system call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// Its number.
    pub number: u32,
    /// Its name.
    pub name: &'static str,
    /// Its arguments; `None` where the kernel that was asked did not have the call.
    pub arguments: Option<Vec<Argument>>,
}

/// An argument of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument {
    /// Its C type.
    pub kind: &'static str,
    /// Its name in the kernel.
    pub name: &'static str,
}

/// All calls that are known, by number.
pub fn all() -> &'static [Signature] {
    static ALL: OnceLock<Vec<Signature>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut all: Vec<Signature> =
            TABLE.lines().filter(|line| !line.starts_with('#')).filter_map(signature).collect();
        let newer = Sysno::iter().filter_map(|call| {
            let number = u32::try_from(call.id()).ok()?;
            let known = all.iter().any(|signature| signature.number == number);
            (!known).then(|| Signature { number, name: call.name(), arguments: None })
        });
        let newer: Vec<_> = newer.collect();
        all.extend(newer);
        all.sort_by_key(|signature| signature.number);
        all
    })
}

/// The call of a name.
pub fn named(name: &str) -> Option<&'static Signature> {
    all().iter().find(|signature| signature.name == name)
}

/// The call of a number.
pub fn numbered(number: u32) -> Option<&'static Signature> {
    all().binary_search_by_key(&number, |signature| signature.number).ok().and_then(|index| all().get(index))
}

fn signature(line: &'static str) -> Option<Signature> {
    let mut fields = line.split('\t');
    let number = fields.next()?.parse().ok()?;
    let name = fields.next()?;
    let arguments: Option<Vec<Argument>> = fields.map(argument).collect();
    Some(Signature { number, name, arguments })
}

fn argument(text: &'static str) -> Option<Argument> {
    let start = text.rfind([' ', '*'])? + 1;
    Some(Argument { kind: text.get(..start)?.trim(), name: text.get(start..)? })
}

impl Argument {
    /// Whether it is a path that the call looks up.
    pub fn is_path(&self) -> bool {
        const NAMES: [&str; 9] = [
            "filename",
            "pathname",
            "path",
            "oldname",
            "newname",
            "dir_name",
            "new_root",
            "put_old",
            "specialfile",
        ];
        matches!(self.kind, "const char *" | "char *") && NAMES.contains(&self.name)
    }

    /// Whether it is a descriptor.
    pub fn is_descriptor(&self) -> bool {
        const NAMES: [&str; 14] = [
            "fd", "ufd", "epfd", "oldfd", "newfd", "fildes", "out_fd", "in_fd", "fd_in", "fd_out", "fdin",
            "fdout", "mqdes", "pidfd",
        ];
        !self.kind.ends_with('*') && NAMES.contains(&self.name)
    }

    /// Whether it is the descriptor of a directory that a path is relative to.
    pub fn is_directory(&self) -> bool {
        self.kind == "int" && self.name.ends_with("dfd")
    }
}

impl Signature {
    /// Whether it transfers bytes, as many as it is asked for or fewer.
    pub fn transfers(&self) -> bool {
        let shape = self.shape();
        shape.count != NO_ARGUMENT || shape.vector != NO_ARGUMENT
    }

    /// Which argument is what.
    pub fn shape(&self) -> Shape {
        let mut shape = Shape::NONE;
        let arguments = self.arguments.as_deref().unwrap_or_default();
        let index = |index: usize| u8::try_from(index).unwrap_or(NO_ARGUMENT);
        let content = self.name.starts_with("symlink");
        let paths = arguments
            .iter()
            .enumerate()
            .filter(|(_, argument)| argument.is_path() && !(content && argument.name == "oldname"));
        for (place, (at, _)) in (0..2).zip(paths) {
            shape.path[place] = index(at);
            let before = at.checked_sub(1).and_then(|before| arguments.get(before));
            let is_directory =
                |before: &Argument| before.is_directory() || (self.name == "execveat" && before.name == "fd");
            if before.is_some_and(is_directory) {
                shape.directory[place] = index(at - 1);
            }
        }
        if let Some(first) = arguments.first()
            && first.is_descriptor()
            && self.name != "execveat"
        {
            shape.descriptor = 0;
        }
        if self.name == "mmap" {
            shape.descriptor = 4;
        }
        (shape.count, shape.vector, shape.address) = match self.name {
            "write" | "pwrite64" | "read" | "pread64" | "recvfrom" => (2, NO_ARGUMENT, NO_ARGUMENT),
            "sendto" => (2, NO_ARGUMENT, 4),
            "getrandom" => (1, NO_ARGUMENT, NO_ARGUMENT),
            "readv" | "writev" | "preadv" | "pwritev" | "preadv2" | "pwritev2" => {
                (NO_ARGUMENT, 1, NO_ARGUMENT)
            }
            "connect" | "bind" => (NO_ARGUMENT, NO_ARGUMENT, 1),
            _ => (NO_ARGUMENT, NO_ARGUMENT, NO_ARGUMENT),
        };
        shape
    }
}

/// The shapes of all calls, by number; the last is that of unknown ones.
pub(crate) fn shapes() -> [Shape; CALLS + 1] {
    let mut shapes = [Shape::NONE; CALLS + 1];
    for signature in all() {
        let index = usize::try_from(signature.number).unwrap_or(CALLS);
        if let Some(shape) = shapes.get_mut(index).filter(|_| index < CALLS) {
            *shape = signature.shape();
        }
    }
    shapes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(name: &str) -> Shape {
        named(name).unwrap().shape()
    }

    #[test]
    fn the_table_agrees_with_the_crate_about_names() {
        for call in Sysno::iter() {
            let number = u32::try_from(call.id()).unwrap();
            assert_eq!(numbered(number).map(|signature| signature.name), Some(call.name()), "{number}");
        }
    }

    #[test]
    fn arguments_are_known() {
        let openat = named("openat").unwrap();
        assert_eq!(openat.number, 257);
        let arguments: Vec<_> = openat.arguments.as_ref().unwrap().iter().map(|a| (a.kind, a.name)).collect();
        let expected = [("int", "dfd"), ("const char *", "filename"), ("int", "flags"), ("umode_t", "mode")];
        assert_eq!(arguments, expected);
        assert_eq!(named("sched_yield").unwrap().arguments.as_deref(), Some(&[][..]));
        assert_eq!(named("no_such_call"), None);
    }

    #[test]
    fn paths_and_what_they_are_relative_to_are_found() {
        assert_eq!((shape("open").path, shape("open").directory), ([0, NO_ARGUMENT], [NO_ARGUMENT; 2]));
        assert_eq!((shape("openat").path[0], shape("openat").directory[0]), (1, 0));
        assert_eq!((shape("renameat2").path, shape("renameat2").directory), ([1, 3], [0, 2]));
        assert_eq!(
            (shape("symlinkat").path, shape("symlinkat").directory),
            ([2, NO_ARGUMENT], [1, NO_ARGUMENT])
        );
        assert_eq!((shape("execveat").path[0], shape("execveat").directory[0]), (1, 0));
        assert_eq!(shape("execveat").descriptor, NO_ARGUMENT);
        for name in [
            "stat",
            "lstat",
            "access",
            "unlink",
            "mkdir",
            "chdir",
            "execve",
            "statfs",
            "truncate",
            "chmod",
            "utimensat",
            "statx",
            "readlink",
            "faccessat2",
            "mount",
        ] {
            assert_ne!(shape(name).path[0], NO_ARGUMENT, "{name}");
        }
    }

    #[test]
    fn descriptors_and_buffers_are_found() {
        for name in [
            "read",
            "write",
            "close",
            "fsync",
            "lseek",
            "connect",
            "sendmsg",
            "ftruncate",
            "ioctl",
            "fcntl",
            "epoll_wait",
            "readv",
            "getdents64",
            "flock",
        ] {
            assert_eq!(shape(name).descriptor, 0, "{name}");
        }
        assert_eq!(shape("read").count, 2);
        assert!(named("readv").unwrap().transfers() && !named("openat").unwrap().transfers());
        assert_eq!(
            (shape("writev").vector, shape("connect").address, shape("pipe").descriptor),
            (1, 1, NO_ARGUMENT)
        );
    }
}
