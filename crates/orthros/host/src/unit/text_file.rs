//! Reading files that a unit names: its packager chooses which.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// More than any unit, drop-in or file of variables has.
const LONGEST: u64 = 1 << 20;

/// Reads a regular file of at most 1 MiB as text. A pipe is not waited for, and a device is not read.
///
/// # Errors
/// Those of open(2) and read(2); `InvalidInput` for what is no regular file, `FileTooLarge`, `InvalidData` for what is
/// not UTF-8.
pub(super) fn read_text(path: &Path) -> io::Result<String> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    let mut text = String::new();
    // Files of /proc say that they are empty: what counts is what comes.
    let length = file.take(LONGEST + 1).read_to_string(&mut text)?;
    if length as u64 > LONGEST {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it has more than 1 MiB"));
    }
    Ok(text)
}
