//! What the arguments of system calls are, as far as calls are made with the memory of one context and the rest of
//! another: which point to memory, how much of it, in which direction; which are descriptors.

use crate::shared::link::ROOM;

/// The longest path, with its end.
const PATH: usize = 4096;

/// One argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Argument {
    /// A number.
    Value,
    /// A descriptor, or what stands for the working directory.
    File,
    /// A text that ends with 0.
    Text,
    /// Memory that the call reads, or writes.
    Memory { size: Size, out: bool },
}

/// The size of the memory that an argument points to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// A fixed number of bytes.
    Bytes(usize),
    /// What that argument says.
    Says(usize),
}

/// A system call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Signature {
    pub(crate) arguments: &'static [Argument],
    /// Whether its result is a descriptor.
    pub(crate) makes_file: bool,
}

const V: Argument = Argument::Value;
const F: Argument = Argument::File;
const T: Argument = Argument::Text;

const fn from(argument: usize) -> Argument {
    Argument::Memory { size: Size::Says(argument), out: false }
}

const fn into(argument: usize) -> Argument {
    Argument::Memory { size: Size::Says(argument), out: true }
}

const fn reads(bytes: usize) -> Argument {
    Argument::Memory { size: Size::Bytes(bytes), out: false }
}

const fn writes(bytes: usize) -> Argument {
    Argument::Memory { size: Size::Bytes(bytes), out: true }
}

const STAT: Argument = writes(size_of::<libc::stat>());
const STATX: Argument = writes(size_of::<libc::statx>());
const STATFS: Argument = writes(size_of::<libc::statfs>());

/// The shape of a call, if it is known.
pub(crate) fn of(number: u32) -> Option<Signature> {
    let makes = |arguments: &'static [Argument]| Some(Signature { arguments, makes_file: true });
    let plain = |arguments: &'static [Argument]| Some(Signature { arguments, makes_file: false });
    match libc::c_long::from(number) {
        libc::SYS_open => makes(const { &[T, V, V] }),
        libc::SYS_creat => makes(const { &[T, V] }),
        libc::SYS_openat => makes(const { &[F, T, V, V] }),
        libc::SYS_openat2 => makes(const { &[F, T, from(3), V] }),
        libc::SYS_dup => makes(const { &[F] }),
        libc::SYS_socket => makes(const { &[V, V, V] }),
        libc::SYS_memfd_create => makes(const { &[T, V] }),
        libc::SYS_eventfd2 | libc::SYS_epoll_create1 => makes(const { &[V, V] }),
        libc::SYS_read | libc::SYS_getdents64 => plain(const { &[F, into(2), V] }),
        libc::SYS_write => plain(const { &[F, from(2), V] }),
        libc::SYS_pread64 => plain(const { &[F, into(2), V, V] }),
        libc::SYS_pwrite64 => plain(const { &[F, from(2), V, V] }),
        libc::SYS_lseek | libc::SYS_fchown | libc::SYS_fallocate => plain(const { &[F, V, V, V] }),
        libc::SYS_ftruncate | libc::SYS_fchmod | libc::SYS_flock | libc::SYS_listen | libc::SYS_shutdown => {
            plain(const { &[F, V] })
        }
        libc::SYS_fsync | libc::SYS_fdatasync | libc::SYS_syncfs => plain(const { &[F] }),
        libc::SYS_fstat => plain(const { &[F, STAT] }),
        libc::SYS_stat | libc::SYS_lstat => plain(const { &[T, STAT] }),
        libc::SYS_newfstatat => plain(const { &[F, T, STAT, V] }),
        libc::SYS_statx => plain(const { &[F, T, V, V, STATX] }),
        libc::SYS_statfs => plain(const { &[T, STATFS] }),
        libc::SYS_fstatfs => plain(const { &[F, STATFS] }),
        libc::SYS_access | libc::SYS_truncate | libc::SYS_chmod | libc::SYS_mkdir => plain(const { &[T, V] }),
        libc::SYS_chown | libc::SYS_lchown | libc::SYS_mknod => plain(const { &[T, V, V] }),
        libc::SYS_unlink | libc::SYS_rmdir => plain(const { &[T] }),
        libc::SYS_rename | libc::SYS_link | libc::SYS_symlink => plain(const { &[T, T] }),
        libc::SYS_faccessat | libc::SYS_fchmodat | libc::SYS_mkdirat | libc::SYS_unlinkat => {
            plain(const { &[F, T, V] })
        }
        libc::SYS_faccessat2 | libc::SYS_fchmodat2 | libc::SYS_mknodat => plain(const { &[F, T, V, V] }),
        libc::SYS_fchownat => plain(const { &[F, T, V, V, V] }),
        libc::SYS_renameat => plain(const { &[F, T, F, T] }),
        libc::SYS_renameat2 | libc::SYS_linkat => plain(const { &[F, T, F, T, V] }),
        libc::SYS_symlinkat => plain(const { &[T, F, T] }),
        libc::SYS_utimensat => plain(const { &[F, T, reads(2 * size_of::<libc::timespec>()), V] }),
        libc::SYS_readlink => plain(const { &[T, into(2), V] }),
        libc::SYS_readlinkat => plain(const { &[F, T, into(3), V] }),
        libc::SYS_getcwd | libc::SYS_getrandom => plain(const { &[into(1), V, V] }),
        libc::SYS_connect | libc::SYS_bind => plain(const { &[F, from(2), V] }),
        libc::SYS_sendto => plain(const { &[F, from(2), V, V, from(5), V] }),
        libc::SYS_setsockopt => plain(const { &[F, V, V, from(4), V] }),
        libc::SYS_uname => plain(const { &[writes(size_of::<libc::utsname>())] }),
        libc::SYS_kill | libc::SYS_getpgid | libc::SYS_getsid | libc::SYS_getpriority => {
            plain(const { &[V, V] })
        }
        libc::SYS_getpid
        | libc::SYS_getppid
        | libc::SYS_getuid
        | libc::SYS_geteuid
        | libc::SYS_getgid
        | libc::SYS_getegid => plain(const { &[] }),
        _ => None,
    }
}

/// Where one argument's memory is among that of all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) argument: usize,
    pub(crate) offset: usize,
    pub(crate) length: usize,
    pub(crate) out: bool,
}

/// The arguments' memory, copied together.
#[derive(Debug, Default)]
pub(crate) struct Parcel {
    pub(crate) bytes: Vec<u8>,
    pub(crate) parts: Vec<Part>,
}

/// How many bytes a parcel holds at most. A read or write of more is one of so many.
const MOST: usize = ROOM - 2 * PATH;

impl Parcel {
    /// Copies what the arguments point to with `copy`, which fills a buffer as far as there is memory. Lengths above
    /// the bound are cut in `arguments`.
    pub(crate) fn pack<E>(
        signature: &Signature,
        arguments: &mut [u64; 6],
        mut copy: impl FnMut(u64, &mut [u8]) -> Result<usize, E>,
    ) -> Result<Self, E> {
        let mut parcel = Self::default();
        for (index, kind) in signature.arguments.iter().enumerate() {
            let address = arguments[index];
            if address == 0 {
                continue;
            }
            let offset = parcel.bytes.len().next_multiple_of(16);
            let room = MOST.saturating_sub(offset);
            let (length, out) = match *kind {
                Argument::Value | Argument::File => continue,
                Argument::Text => (PATH.min(room), false),
                Argument::Memory { size: Size::Bytes(bytes), out } => (bytes.min(room), out),
                Argument::Memory { size: Size::Says(which), out } => {
                    let said = usize::try_from(arguments[which]).unwrap_or(usize::MAX);
                    let length = said.min(room);
                    arguments[which] = length as u64;
                    (length, out)
                }
            };
            parcel.bytes.resize(offset + length, 0);
            let mut length = length;
            if !out && length > 0 {
                let there = copy(address, &mut parcel.bytes[offset..])?;
                if *kind == Argument::Text {
                    let text = &parcel.bytes[offset..offset + there];
                    // Where no end is in sight, there is none that the kernel would accept.
                    length = text.iter().position(|byte| *byte == 0).map_or(there, |end| end + 1);
                    parcel.bytes.truncate(offset + length);
                    if parcel.bytes.last() != Some(&0) {
                        parcel.bytes.resize(offset + PATH, b'x');
                        length = PATH;
                    }
                } else {
                    length = there;
                }
            }
            parcel.parts.push(Part { argument: index, offset, length, out });
        }
        Ok(parcel)
    }

    /// Returns the arguments, pointing into the parcel.
    pub(crate) fn aim(&mut self, mut arguments: [u64; 6]) -> [u64; 6] {
        let start = self.bytes.as_mut_ptr().expose_provenance();
        for part in &self.parts {
            arguments[part.argument] = (start + part.offset) as u64;
        }
        arguments
    }

    /// Returns what the call wrote, and for which argument. Of a read, only what was read.
    pub(crate) fn written(&self, signature: &Signature, result: i64) -> Vec<(usize, &[u8])> {
        let counted = |argument: usize| {
            matches!(signature.arguments.get(argument), Some(Argument::Memory { size: Size::Says(_), .. }))
        };
        if result < 0 {
            return Vec::new();
        }
        let out = self.parts.iter().filter(|part| part.out);
        out.map(|part| {
            let most =
                if counted(part.argument) { usize::try_from(result).unwrap_or(0) } else { part.length };
            (part.argument, &self.bytes[part.offset..part.offset + part.length.min(most)])
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_packed() {
        let texts = |address: u64, buffer: &mut [u8]| -> Result<usize, ()> {
            let text: &[u8] = if address == 100 { b"/etc/passwd\0rest" } else { b"no end" };
            let length = text.len().min(buffer.len());
            buffer[..length].copy_from_slice(&text[..length]);
            Ok(length)
        };
        let signature = of(u32::try_from(libc::SYS_openat).unwrap()).unwrap();
        let mut arguments = [u64::MAX, 100, 2, 3, 0, 0];
        let mut parcel = Parcel::pack(&signature, &mut arguments, texts).unwrap();
        assert_eq!(&parcel.bytes, b"/etc/passwd\0");
        let aimed = parcel.aim(arguments);
        assert_eq!((aimed[0], aimed[2], aimed[3]), (u64::MAX, 2, 3));
        assert_eq!(aimed[1], parcel.bytes.as_ptr().addr() as u64);
        let parcel = Parcel::pack(&signature, &mut [0, 7, 0, 0, 0, 0], texts).unwrap();
        assert_eq!(parcel.bytes.len(), PATH, "too long for the kernel");
        assert!(!parcel.bytes.contains(&0));
    }

    #[test]
    fn reads_are_bounded() {
        let signature = of(u32::try_from(libc::SYS_read).unwrap()).unwrap();
        let mut arguments = [3, 1000, u64::MAX, 0, 0, 0];
        let parcel = Parcel::pack(&signature, &mut arguments, |_, _: &mut [u8]| Err(())).unwrap();
        assert_eq!(arguments[2], MOST as u64);
        let written = parcel.written(&signature, 5);
        assert_eq!((written.len(), written[0].0, written[0].1.len()), (1, 1, 5));
        assert!(parcel.written(&signature, -5).is_empty());
    }

    #[test]
    fn null_stays_null() {
        let signature = of(u32::try_from(libc::SYS_utimensat).unwrap()).unwrap();
        let mut parcel =
            Parcel::pack(&signature, &mut [4, 0, 0, 0, 0, 0], |_, _: &mut [u8]| Err(())).unwrap();
        assert!(parcel.parts.is_empty());
        assert_eq!(parcel.aim([4, 0, 0, 0, 0, 0]), [4, 0, 0, 0, 0, 0]);
    }
}
