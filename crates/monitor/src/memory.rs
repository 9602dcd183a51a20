//! The program's memory, copied: process_vm_readv(2) and its twin, one call each in the usual case.
//!
//! What lies there may change while it is read. So everything is copied once, and decided about and performed on the
//! copy.

use libc::iovec;
use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use orrery_sys::errno;

/// The longest path that the kernel takes, its terminating zero included.
const PATH_MAX: usize = 4096;
const PAGE: usize = 4096;
/// How much is copied at first for a path: most are shorter.
const FIRST: usize = 256;

fn local(bytes: &mut [u8]) -> iovec {
    iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
}

fn remote(address: usize, length: usize) -> iovec {
    iovec { iov_base: std::ptr::without_provenance_mut(address), iov_len: length }
}

fn address(pointer: u64) -> Result<usize, Errno> {
    usize::try_from(pointer).map_err(|_| Errno::FAULT)
}

/// Copies as much as can be read, which may be nothing.
fn read_some(thread: i32, from: usize, to: &mut [u8]) -> Result<usize, Errno> {
    let (here, there) = (local(to), remote(from, to.len()));
    // SAFETY: the local vector describes `to`, which is writable and as long as stated.
    unsafe { syscall!(Sysno::process_vm_readv, thread, &raw const here, 1, &raw const there, 1, 0) }
        .map_err(errno)
}

/// Fills `to` with what lies at `pointer`.
///
/// # Errors
/// `EFAULT` where not all of it is memory; `EPERM` where the process is closed to the monitor.
pub(crate) fn read(thread: i32, pointer: u64, to: &mut [u8]) -> Result<(), Errno> {
    if to.is_empty() {
        return Ok(());
    }
    let length = to.len();
    match read_some(thread, address(pointer)?, to)? {
        all if all == length => Ok(()),
        _ => Err(Errno::FAULT),
    }
}

/// Copies the text at `pointer`, without its terminating zero.
///
/// # Errors
/// `EFAULT` as the kernel would; `ENAMETOOLONG` for a text without an end.
pub(crate) fn read_path(thread: i32, pointer: u64) -> Result<Vec<u8>, Errno> {
    read_text(thread, pointer, PATH_MAX)
}

/// Copies the text at `pointer`, which has fewer than `most` bytes.
///
/// # Errors
/// As of [`read_path`].
pub(crate) fn read_text(thread: i32, pointer: u64, most: usize) -> Result<Vec<u8>, Errno> {
    let mut at = address(pointer)?;
    let mut text = Vec::with_capacity(FIRST);
    loop {
        // Never across a page's end, behind which there may be nothing.
        let chunk = FIRST.max(text.len()).min(PAGE - at % PAGE).min(most - text.len());
        let start = text.len();
        text.resize(start + chunk, 0);
        let read = read_some(thread, at, &mut text[start..])?;
        if read == 0 {
            return Err(Errno::FAULT);
        }
        text.truncate(start + read);
        if let Some(end) = text[start..].iter().position(|&byte| byte == 0) {
            text.truncate(start + end);
            return Ok(text);
        }
        if text.len() >= most {
            return Err(Errno::NAMETOOLONG);
        }
        at = at.checked_add(read).ok_or(Errno::FAULT)?;
    }
}

/// Writes all of `bytes` to `pointer`, where the program may write itself.
///
/// # Errors
/// `EFAULT`.
pub(crate) fn write(thread: i32, pointer: u64, bytes: &[u8]) -> Result<(), Errno> {
    if bytes.is_empty() {
        return Ok(());
    }
    let here = iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let there = remote(address(pointer)?, bytes.len());
    // SAFETY: the local vector describes `bytes`, which are only read.
    let written =
        unsafe { syscall!(Sysno::process_vm_writev, thread, &raw const here, 1, &raw const there, 1, 0) };
    match written.map_err(errno)? {
        all if all == bytes.len() => Ok(()),
        _ => Err(Errno::FAULT),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> i32 {
        rustix::thread::gettid().as_raw_pid()
    }

    fn at<T>(value: *const T) -> u64 {
        value.addr() as u64
    }

    #[test]
    fn texts_end_at_their_zero() {
        let mut text = vec![b'a'; 3000];
        text.extend(b"\0behind");
        assert_eq!(read_path(me(), at(text.as_ptr())).unwrap(), vec![b'a'; 3000]);
        assert_eq!(read_path(me(), at(c"short".as_ptr())).unwrap(), b"short");
        assert_eq!(read_path(me(), at(c"".as_ptr())).unwrap(), b"");
        let endless = vec![b'a'; 9000];
        assert_eq!(read_path(me(), at(endless.as_ptr())), Err(Errno::NAMETOOLONG));
        assert_eq!(read_path(me(), 8), Err(Errno::FAULT));
        assert_eq!(read_path(me(), u64::MAX), Err(Errno::FAULT));
    }

    #[test]
    fn memory_goes_there_and_back() {
        let mut target = [0_u8; 16];
        write(me(), at((&raw mut target).cast_const()), b"0123456789abcdef").unwrap();
        let mut copy = [0; 16];
        read(me(), at(&raw const target), &mut copy).unwrap();
        assert_eq!(&copy, b"0123456789abcdef");
        assert_eq!(write(me(), 8, b"x"), Err(Errno::FAULT));
        assert_eq!(read(me(), 8, &mut copy), Err(Errno::FAULT));
    }
}
