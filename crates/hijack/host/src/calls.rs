//! What is known of system calls: names, arguments, which of these are paths, descriptors, buffers.
//!
//! The table comes from the kernel itself (tracefs; `calls/generate` makes it) and, for calls that the kernel does not
//! describe, from `calls/by-hand`; the meaning of an argument from its type and name there.

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
    /// The number of the system call.
    pub number: u32,
    /// The name of the system call.
    pub name: &'static str,
    /// Its arguments; `None` where the kernel that was asked did not have the call.
    pub arguments: Option<Vec<Argument>>,
}

/// An argument of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Argument {
    /// The C type of the argument.
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

/// Returns the call of a name.
pub fn named(name: &str) -> Option<&'static Signature> {
    all().iter().find(|signature| signature.name == name)
}

/// Returns the call of a number.
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
    /// Returns whether it is a string, or a buffer of bytes that the kernel calls characters.
    fn is_text(&self) -> bool {
        matches!(self.kind, "const char *" | "char *")
    }

    /// Returns whether it is a descriptor.
    pub fn is_descriptor(&self) -> bool {
        const NAMES: [&str; 14] = [
            "fd", "ufd", "epfd", "oldfd", "newfd", "fildes", "out_fd", "in_fd", "fd_in", "fd_out", "fdin",
            "fdout", "mqdes", "pidfd",
        ];
        !self.kind.ends_with('*') && NAMES.contains(&self.name)
    }

    /// Returns whether it is the descriptor of a directory that a path is relative to.
    pub fn is_directory(&self) -> bool {
        self.kind == "int" && self.name.ends_with("dfd")
    }
}

/// Names of arguments that are paths, in every call.
const PATHS: [&str; 12] = [
    "dir_name",
    "filename",
    "from_pathname",
    "library",
    "new_root",
    "newname",
    "oldname",
    "path",
    "pathname",
    "put_old",
    "specialfile",
    "to_pathname",
];
/// Arguments that are paths though their names mean something else elsewhere.
const ALSO_PATHS: [(&str, &str); 5] = [
    ("acct", "name"),
    ("mount", "dev_name"),
    ("name_to_handle_at", "name"),
    ("quotactl", "special"),
    ("umount2", "name"),
];

impl Signature {
    /// Returns whether an argument is a path that the call looks up. The content of a symbolic link is none.
    pub fn is_path(&self, argument: &Argument) -> bool {
        let content = self.name.starts_with("symlink") && argument.name == "oldname";
        let named = PATHS.contains(&argument.name) || ALSO_PATHS.contains(&(self.name, argument.name));
        argument.is_text() && named && !content
    }

    /// Returns whether it takes the address of a socket, which may be a path.
    pub fn takes_address(&self) -> bool {
        self.shape().address != NO_ARGUMENT
    }

    /// Returns whether it transfers bytes, as many as it is asked for or fewer.
    pub fn transfers(&self) -> bool {
        let shape = self.shape();
        shape.count != NO_ARGUMENT || shape.vector != NO_ARGUMENT
    }

    /// Returns which argument is what.
    pub fn shape(&self) -> Shape {
        let mut shape = Shape::NONE;
        let arguments = self.arguments.as_deref().unwrap_or_default();
        let index = |index: usize| u8::try_from(index).unwrap_or(NO_ARGUMENT);
        let paths = arguments.iter().enumerate().filter(|(_, argument)| self.is_path(argument));
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
            // Those of messages are in their headers.
            "connect" | "bind" | "sendmsg" | "sendmmsg" => (NO_ARGUMENT, NO_ARGUMENT, 1),
            _ => (NO_ARGUMENT, NO_ARGUMENT, NO_ARGUMENT),
        };
        shape
    }
}

/// Numbers that no known call has, for which a table has room; the last stands for all that are larger.
pub(crate) fn unknown() -> Vec<u32> {
    let all = u32::try_from(CALLS).unwrap_or(u32::MAX);
    (0..=all).filter(|number| numbered(*number).is_none()).collect()
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
    fn every_call_of_the_table_is_described() {
        let not: Vec<_> =
            all().iter().filter(|call| call.arguments.is_none()).map(|call| call.name).collect();
        assert_eq!(not, [""; 0], "describe them in calls/by-hand, and run calls/generate");
    }

    /// Strings and buffers that are no paths: a call that is new in the table has to say here, or in [`PATHS`], what
    /// its are.
    const NO_PATHS: [&str; 21] = [
        "buf",
        "buff",
        "cmdline_ptr",
        "list",
        "name",
        "name_user",
        "optval",
        "shmaddr",
        "special",
        "type",
        "u_msg_ptr",
        "u_name",
        "uargs",
        "ubuf",
        "uname",
        "value",
        "_callout_info",
        "_description",
        "_fs_name",
        "_key",
        "_type",
    ];

    #[test]
    fn every_string_is_a_path_or_known_to_be_none() {
        for call in all() {
            for argument in call.arguments.iter().flatten().filter(|argument| argument.is_text()) {
                let content = call.name.starts_with("symlink") && argument.name == "oldname";
                let known = content || NO_PATHS.contains(&argument.name);
                assert!(call.is_path(argument) || known, "{}: what is {}?", call.name, argument.name);
            }
        }
    }

    /// Has the kernel say whether it knows a call, in a process of its own: it may be anything.
    fn kernel_knows(number: u32) -> bool {
        // SAFETY: the child makes two system calls and ends; arguments that are no addresses, descriptors or sizes
        // change nothing.
        unsafe {
            let child = libc::fork();
            assert!(child >= 0);
            if child == 0 {
                let result = libc::syscall(i64::from(number), -1, -1, -1, -1, -1, -1);
                let missing = result == -1 && *libc::__errno_location() == libc::ENOSYS;
                libc::_exit(i32::from(!missing));
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            !(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0)
        }
    }

    #[test]
    fn the_running_kernel_knows_no_call_that_the_table_does_not_describe() {
        /// Numbers that begin a second table, of calls for the x32 interface.
        const X32: std::ops::Range<u32> = 512..548;
        let last = all().last().unwrap().number;
        for number in (0..last + 200).filter(|number| numbered(*number).is_none() && !X32.contains(number)) {
            assert!(!kernel_knows(number), "describe call {number} in calls/by-hand, and run calls/generate");
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
            "acct",
            "umount2",
            "quotactl",
            "name_to_handle_at",
            "move_mount",
            "swapon",
            "uselib",
            "fchmodat2",
            "setxattrat",
            "getxattrat",
            "listxattrat",
            "removexattrat",
            "open_tree_attr",
            "file_getattr",
            "file_setattr",
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
