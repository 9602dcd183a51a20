//! Paths as the program means them: from the root, without dots.
//!
//! Nothing is looked up: `..` removes a name, even if it is a symbolic link. What a policy compares is thus what the
//! program said, and not where it leads; it is no boundary.

use crate::executive::abi::syscall::{ENAMETOOLONG, address_mut, call, failed};
use crate::executive::abi::user_memory;
use crate::nr;

/// Stands for the working directory where a call takes the descriptor of a directory.
pub(crate) const AT_FDCWD: i32 = -100;

/// PathBuffer for paths, which hands out what it has left.
pub(crate) struct PathBuffer<'a> {
    free: &'a mut [u8],
}

impl<'a> PathBuffer<'a> {
    pub(crate) fn new(free: &'a mut [u8]) -> Self {
        Self { free }
    }

    /// Lends the room, and keeps nothing of it.
    pub(crate) fn lend<R>(&mut self, use_it: impl FnOnce(&mut [u8]) -> R) -> R {
        use_it(self.free)
    }

    /// Has something written to the room, and keeps as much as was.
    pub(crate) fn take(
        &mut self,
        write: impl FnOnce(&mut [u8]) -> Result<usize, i64>,
    ) -> Result<&'a mut [u8], i64> {
        let length = write(self.free)?;
        let free = core::mem::take(&mut self.free);
        let (taken, rest) = free.split_at_mut_checked(length).ok_or(-ENAMETOOLONG)?;
        self.free = rest;
        Ok(taken)
    }
}

/// Writes the path that a call names by a string and the descriptor of a directory.
///
/// # Errors
/// `-EFAULT`, `-ENAMETOOLONG`, or why the directory has no path.
pub(crate) fn absolute(directory: Option<u64>, path: u64, to: &mut [u8]) -> Result<usize, i64> {
    // The string in the further half, what becomes of it in the other.
    let (result, room) = to.split_at_mut(to.len() / 2);
    let length = user_memory::read_string(path, room)?;
    let raw = if length < room.len() { room.get(..length) } else { None }.ok_or(-ENAMETOOLONG)?;
    let start = if raw.first() == Some(&b'/') { 0 } else { of_directory(directory, result)? };
    normal(result, start, raw)
}

/// Returns the path of the directory that relative paths begin at.
///
/// # Errors
/// What `getcwd` and `readlink` say; `-ENAMETOOLONG`.
pub(crate) fn of_directory(directory: Option<u64>, to: &mut [u8]) -> Result<usize, i64> {
    // The kernel reads an `int`.
    match directory.map(|directory| directory as i32) {
        None | Some(AT_FDCWD) => {
            // SAFETY: the kernel writes into the slice.
            let length =
                unsafe { call(nr::getcwd, [to.as_mut_ptr().addr() as u64, to.len() as u64, 0, 0, 0, 0]) };
            // With its zero.
            if failed(length) { Err(length) } else { Ok((length as usize).saturating_sub(1)) }
        }
        Some(descriptor) => of_fd(descriptor, to),
    }
}

/// Writes the path of a descriptor, as `/proc/self/fd` has it.
///
/// # Errors
/// What `readlink` says; `-ENAMETOOLONG`.
pub(crate) fn of_fd(descriptor: i32, to: &mut [u8]) -> Result<usize, i64> {
    let mut name = *b"/proc/self/fd/\0\0\0\0\0\0\0\0\0\0\0";
    let mut digits = [0_u8; 10];
    let mut value = descriptor.max(0).cast_unsigned();
    let mut first = digits.len();
    loop {
        first -= 1;
        if let Some(digit) = digits.get_mut(first) {
            *digit = b'0' + (value % 10) as u8;
        }
        value /= 10;
        if value == 0 {
            break;
        }
    }
    for (place, digit) in name.iter_mut().skip(14).zip(digits.iter().skip(first)) {
        *place = *digit;
    }
    let arguments = [address_mut(&mut name), to.as_mut_ptr().addr() as u64, to.len() as u64, 0, 0, 0];
    // SAFETY: a string that ends with zero, and a slice to write to.
    let length = unsafe { call(nr::readlink, arguments) };
    match length {
        length if failed(length) => Err(length),
        length if length as usize >= to.len() => Err(-ENAMETOOLONG),
        length => Ok(length as usize),
    }
}

/// Appends a path to the first bytes of `to`, name by name.
///
/// # Errors
/// `-ENAMETOOLONG`.
pub(crate) fn normal(to: &mut [u8], start: usize, path: &[u8]) -> Result<usize, i64> {
    let mut length = start;
    if to.get(..length) == Some(b"/") {
        length = 0;
    }
    for name in path.split(|byte| *byte == b'/') {
        match name {
            b"" | b"." => {}
            b".." => {
                let before = to.get(..length).unwrap_or(&[]);
                length = before.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
            }
            name => {
                let place = to.get_mut(length..length + 1 + name.len()).ok_or(-ENAMETOOLONG)?;
                if let Some((slash, rest)) = place.split_first_mut() {
                    *slash = b'/';
                    rest.copy_from_slice(name);
                }
                length += 1 + name.len();
            }
        }
    }
    if length == 0 {
        *to.first_mut().ok_or(-ENAMETOOLONG)? = b'/';
        length = 1;
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(start: &str, path: &str) -> String {
        let mut to = [0; 64];
        to[..start.len()].copy_from_slice(start.as_bytes());
        let length = normal(&mut to, start.len(), path.as_bytes()).unwrap();
        String::from_utf8(to[..length].to_vec()).unwrap()
    }

    #[test]
    fn dots_and_slashes_go() {
        for (start, path, expected) in [
            ("", "/etc/passwd", "/etc/passwd"),
            ("", "//etc/./apt/../passwd", "/etc/passwd"),
            ("", "/..", "/"),
            ("", "/", "/"),
            ("/home/x", "y", "/home/x/y"),
            ("/home/x", "../../..", "/"),
            ("/home/x", "../y/", "/home/y"),
            ("/", "y", "/y"),
            ("/home/x", "", "/home/x"),
            ("/home/x", ".", "/home/x"),
        ] {
            assert_eq!(joined(start, path), expected, "{start} {path}");
        }
    }

    #[test]
    fn what_does_not_fit_is_too_long() {
        assert_eq!(normal(&mut [0; 4], 0, b"/a/bc"), Err(-ENAMETOOLONG));
        assert_eq!(normal(&mut [0; 4], 0, b"/abc"), Ok(4));
    }

    #[test]
    fn paths_are_read_and_joined() {
        let directory = std::env::current_dir().unwrap();
        let mut to = [0; 4096];
        let length = absolute(None, c"x/../y".as_ptr().addr() as u64, &mut to).unwrap();
        assert_eq!(&to[..length], directory.join("y").to_str().unwrap().as_bytes());
        assert!(absolute(None, 8, &mut to).is_err());
        let file = std::fs::File::open("/proc/self").unwrap();
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&file);
        let length = absolute(Some(descriptor as u64), c"maps".as_ptr().addr() as u64, &mut to).unwrap();
        assert_eq!(&to[..length], format!("/proc/{}/maps", std::process::id()).as_bytes());
    }

    #[test]
    fn room_is_handed_out_once() {
        let mut bytes = [0; 8];
        let mut room = PathBuffer::new(&mut bytes);
        let first = room
            .take(|to| {
                to[..3].copy_from_slice(b"abc");
                Ok(3)
            })
            .unwrap();
        let second = room
            .take(|to| {
                to[0] = b'd';
                Ok(1)
            })
            .unwrap();
        assert_eq!((&*first, &*second), (&b"abc"[..], &b"d"[..]));
        assert!(room.take(|_| Ok(9)).is_err());
    }
}
