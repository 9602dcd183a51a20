//! Memory of other processes.

use std::io;

/// Reads the memory of a process (process_vm_readv(2)).
///
/// # Errors
/// `EFAULT`, or `UnexpectedEof` where only a part is there. `EPERM`: this process may not look into that one. `ESRCH`.
pub fn read(pid: libc::pid_t, from: u64, to: &mut [u8]) -> io::Result<()> {
    let local = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
    let remote = remote(from, to.len());
    // SAFETY: `local` is the slice, which lives until the call returns.
    let done = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    complete(done, to.len())
}

/// Writes slices to the memory of a process, one behind the other (process_vm_writev(2)).
///
/// # Errors
/// `EFAULT`, or `UnexpectedEof` where only a part is there. `EPERM`: this process may not look into that one. `ESRCH`.
pub fn write<const N: usize>(pid: libc::pid_t, to: u64, from: [&[u8]; N]) -> io::Result<()> {
    let local =
        from.map(|piece| libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() });
    let length = from.iter().map(|piece| piece.len()).sum();
    let remote = remote(to, length);
    let pieces = libc::c_ulong::try_from(N).unwrap_or(0);
    // SAFETY: `local` are the slices, which live until the call returns, and are only read.
    let done = unsafe { libc::process_vm_writev(pid, local.as_ptr(), pieces, &raw const remote, 1, 0) };
    complete(done, length)
}

fn remote(at: u64, length: usize) -> libc::iovec {
    let at = usize::try_from(at).unwrap_or(0);
    libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(at), iov_len: length }
}

fn complete(done: isize, length: usize) -> io::Result<()> {
    match usize::try_from(done) {
        Ok(done) if done == length => Ok(()),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}
