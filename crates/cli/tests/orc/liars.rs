//! Stores that lie to unmodified programs, which then run as they would without one.

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Output};
use std::thread::JoinHandle;

use orrery_orc_client::protocol::{FileRange, FileRangeReply, Refusal, Reply, Request, decode_request};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::hostile::send;

/// What it is that comes back for pieces of files.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    /// Memory that anybody can still write to.
    Unsealed,
    /// Memory that can shrink, so that whoever looks at it is killed.
    Shrinking,
    /// Sealed memory of a page.
    Short,
    /// A file with a name, which is no memory at all.
    File,
    /// More answers than descriptors.
    NoDescriptors,
    /// A place beyond all numbers.
    Astray,
    /// Fewer answers than pieces.
    TooFew,
    /// The answer to another question.
    OtherTag,
    /// Anything but a message.
    Noise,
    /// No answer at all.
    Goodbye,
}

const LIES: [Lie; 10] = [
    Lie::Unsealed,
    Lie::Shrinking,
    Lie::Short,
    Lie::File,
    Lie::NoDescriptors,
    Lie::Astray,
    Lie::TooFew,
    Lie::OtherTag,
    Lie::Noise,
    Lie::Goodbye,
];

fn memory(length: u64, seals: SealFlags) -> OwnedFd {
    let memory = rustix::fs::memfd_create("lie", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&memory, length).unwrap();
    rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
    memory
}

impl Lie {
    fn descriptor(self, longest: u64) -> OwnedFd {
        let all = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        match self {
            Self::Unsealed => memory(longest, SealFlags::empty()),
            Self::Shrinking => memory(longest, SealFlags::WRITE | SealFlags::GROW | SealFlags::SEAL),
            Self::Short => memory(4096, all),
            Self::File => {
                let file = tempfile::tempfile().unwrap();
                file.set_len(longest).unwrap();
                file.into()
            }
            _ => memory(longest, all),
        }
    }

    /// Answers a question about files; whether there is more to be said.
    fn answer(self, socket: &OwnedFd, tag: u64, pieces: &[FileRange]) -> bool {
        let longest = pieces.iter().map(|piece| piece.offset + piece.length).max().unwrap_or(0);
        let offset = if self == Self::Astray { u64::MAX - 4095 } else { 0 };
        let mut answers = vec![FileRangeReply { refusal: None, duplicate: true, offset }; pieces.len()];
        if self == Self::TooFew {
            answers.pop();
        }
        let fds: Vec<OwnedFd> = match self {
            Self::NoDescriptors => Vec::new(),
            _ => pieces.iter().map(|_| self.descriptor(longest)).collect(),
        };
        let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let message = match self {
            Self::Goodbye => return false,
            Self::Noise => vec![7; 100],
            Self::OtherTag => Reply::FileRanges(answers).encode(tag + 1),
            _ => Reply::FileRanges(answers).encode(tag),
        };
        // A program that has seen through it is gone.
        let _ = send(socket, &message, &borrowed);
        self != Self::OtherTag
    }
}

fn listen(directory: &Path) -> OwnedFd {
    orrery_orc_auditor::install(directory, &[]).unwrap();
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(directory.join("socket")).unwrap()).unwrap();
    rustix::net::listen(&socket, 10).unwrap();
    socket
}

/// Serves one program.
fn serve(socket: OwnedFd, lie: Lie) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let peer = rustix::net::accept(&socket).unwrap();
        let mut buffer = vec![0; 65_536];
        while let Ok((got @ 1.., _)) = rustix::net::recv(&peer, &mut buffer[..], RecvFlags::empty()) {
            match decode_request(&buffer[..got]) {
                Ok((tag, Request::Files(pieces))) => {
                    if !lie.answer(&peer, tag, &pieces) {
                        return;
                    }
                }
                Ok((tag, _)) | Err(tag) => {
                    let _ = send(&peer, &Reply::Refused(Refusal::Denied).encode(tag), &[]);
                }
            }
        }
    })
}

fn echo(directory: &Path) -> Output {
    Command::new("/bin/echo")
        .arg("hello")
        .env("LD_AUDIT", directory.join("liborrery-orc.so"))
        .env("ORRERY_ORC", directory)
        .env("ORRERY_ORC_VERBOSE", "1")
        .output()
        .unwrap()
}

#[test]
fn programs_see_through_lies() {
    for lie in LIES {
        let directory = tempfile::tempdir().unwrap();
        let store = serve(listen(directory.path()), lie);
        let output = echo(directory.path());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && output.stdout == b"hello\n", "{lie:?}: {output:?}");
        let wanted = match lie {
            Lie::Unsealed | Lie::Shrinking | Lie::Short | Lie::File | Lie::Astray => "is not sealed",
            Lie::OtherTag | Lie::Noise | Lie::Goodbye => "does not answer",
            Lie::NoDescriptors | Lie::TooFew => "",
        };
        assert!(said.contains(wanted), "{lie:?}: {said}");
        store.join().unwrap();
    }
}

#[test]
fn programs_do_not_talk_to_other_users_stores() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can become another user");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let path = directory.path().to_owned();
    let socket = std::thread::spawn(move || {
        orrery_orc_auditor::install(&path, &[]).unwrap();
        // SAFETY: the bare system call changes this thread alone, which ends soon.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) }, 0);
        listen(&path)
    })
    .join()
    .unwrap();
    let output = echo(directory.path());
    assert_eq!(output.stdout, b"hello\n");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("belongs to another user"), "{said}");
    drop(socket);
}
