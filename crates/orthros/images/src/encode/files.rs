//! Open files, descriptors and locks.

use std::collections::BTreeMap;

use anyhow::Result;

use super::{sockets, terminals};
use crate::image_file::{ImageFile, ImageType};
use crate::messages::{
    self as m, EpollFile, EventFile, Fdinfo, FifoFile, Fown, Fs, GhostFile, InotifyFile, MemfdFile,
    MemfdInode, PipeData, PipeFile, RegFile, RemapFilePath, SignalFile, TimerFile,
};
use crate::model::{self, Descriptor, Directories, File, LockKind, ProcessState, Service};

/// `FD_TYPES__*` of CRIU's `fdinfo.proto`.
const REGULAR: u32 = 1;
const PIPE: u32 = 2;
const FIFO: u32 = 3;
const INET: u32 = 4;
const UNIX: u32 = 5;
const EVENT: u32 = 6;
const EPOLL: u32 = 7;
const INOTIFY: u32 = 8;
const SIGNAL: u32 = 9;
const TERMINAL: u32 = 11;
const TIMER: u32 = 17;
const MEMFD: u32 = 18;
/// `REMAP_TYPE__GHOST`.
const GHOST: u32 = 1;
/// `LOCK_*` of CRIU's `criu/include/file-lock.h`.
const POSIX_LOCK: u32 = 1;
const FLOCK: u32 = 2;
const OFD_LOCK: u32 = 4;
const SECOND: u64 = 1_000_000_000;
/// `FH_ENTRY_SIZES__min_entries`: a handle must have this length, even if a path makes it unnecessary.
const HANDLE_ENTRIES: usize = 16;

/// Returns the name of the image with an unnamed file's content.
pub(crate) fn ghost_image(number: u32) -> String {
    format!("ghost-file-{number:x}")
}

pub(super) fn directories(pid: u32, directories: &Directories) -> Result<ImageFile> {
    let fs =
        Fs { cwd_id: directories.working.0, root_id: directories.root.0, umask: Some(directories.umask) };
    ImageFile::of(format!("fs-{pid}"), ImageType::Fs, &fs)
}

pub(super) fn descriptors(index: u32, descriptors: &[Descriptor], files: &[File]) -> Result<ImageFile> {
    let kind_of = |id: u32| files.get((id as usize).wrapping_sub(1)).map_or(0, kind);
    let entry = |descriptor: &Descriptor| Fdinfo {
        id: descriptor.file.0,
        flags: u32::from(descriptor.closes_on_exec),
        r#type: kind_of(descriptor.file.0),
        fd: descriptor.fd,
    };
    ImageFile::of_all(format!("fdinfo-{index}"), ImageType::Fdinfo, descriptors.iter().map(entry))
}

fn kind(file: &File) -> u32 {
    match file {
        File::Regular { .. } => REGULAR,
        File::Pipe { .. } => PIPE,
        File::Fifo { .. } => FIFO,
        File::Event { .. } => EVENT,
        File::Epoll { .. } => EPOLL,
        File::Signal { .. } => SIGNAL,
        File::Timer { .. } => TIMER,
        File::Inotify { .. } => INOTIFY,
        File::Memfd { .. } => MEMFD,
        File::Terminal { .. } => TERMINAL,
        File::Inet(_) => INET,
        File::Unix(_) => UNIX,
    }
}

/// Returns the images of all open files but the queues of sockets and the state of terminals.
pub(super) fn all(service: &Service) -> Result<Vec<ImageFile>> {
    let mut images = ghosts(service)?;
    let entries = (1..).zip(&service.files).map(|(id, file)| entry(id, file)).collect::<Result<Vec<_>>>()?;
    images.push(ImageFile::of_all("files", ImageType::Files, entries)?);
    images.extend(pipes(&service.files)?);
    images.push(memfds(&service.files)?);
    images.push(locks(service)?);
    Ok(images)
}

fn entry(id: u32, file: &File) -> Result<m::File> {
    let mut entry = m::File { id, r#type: kind(file), ..m::File::default() };
    match file {
        File::Regular { flags, position, path } => {
            let name = path.clone();
            entry.reg =
                Some(RegFile { id, flags: *flags, pos: *position, fown: Fown::NONE, name, mnt_id: None });
        }
        File::Pipe { flags, inode, .. } => {
            entry.pipe = Some(PipeFile { id, pipe_id: *inode, flags: *flags, fown: Fown::NONE });
        }
        File::Fifo { inode, path, .. } => {
            entry.fifo = Some(FifoFile { id, pipe_id: *inode, regf_id: Some(path.0) });
        }
        File::Event { flags, count } => {
            entry.efd = Some(EventFile { id, flags: *flags, fown: Fown::NONE, counter: *count });
        }
        // What it waits for is added later: by number, and by the present holder of the file.
        File::Epoll { flags, .. } => {
            entry.epfd = Some(EpollFile { id, flags: *flags, fown: Fown::NONE });
        }
        File::Signal { flags, mask } => {
            entry.sgfd = Some(SignalFile { id, flags: *flags, fown: Fown::NONE, sigmask: *mask });
        }
        File::Timer { flags, timer } => entry.tfd = Some(timer_file(id, *flags, timer)),
        File::Inotify { flags, inotify } => entry.ify = Some(inotify_file(id, *flags, inotify)),
        File::Memfd { flags, position, memfd } => {
            let inode_id = u32::try_from(memfd.inode)?;
            entry.memfd = Some(MemfdFile { id, flags: *flags, pos: *position, fown: Fown::NONE, inode_id });
        }
        File::Terminal { flags, path, terminal } => {
            entry.tty = Some(terminals::file(id, *flags, *path, terminal));
        }
        File::Inet(inet) => entry.isk = Some(sockets::inet(id, inet)),
        File::Unix(unix) => entry.usk = Some(sockets::unix(id, unix)),
    }
    Ok(entry)
}

fn timer_file(id: u32, flags: u32, timer: &model::Timer) -> TimerFile {
    TimerFile {
        id,
        flags,
        fown: Fown::NONE,
        clockid: timer.clock,
        ticks: timer.ticks,
        settime_flags: timer.settime_flags,
        vsec: timer.left / SECOND,
        vnsec: timer.left % SECOND,
        isec: timer.interval / SECOND,
        insec: timer.interval % SECOND,
    }
}

fn inotify_file(id: u32, flags: u32, inotify: &model::Inotify) -> InotifyFile {
    let watch = |watch: &model::InotifyWatch| {
        let handle = vec![0; HANDLE_ENTRIES];
        m::InotifyWatch {
            id,
            i_ino: watch.inode,
            mask: watch.mask,
            ignored_mask: 0,
            s_dev: watch.device,
            wd: watch.descriptor,
            f_handle: m::FileHandle { bytes: 0, r#type: 0, handle, path: Some(watch.path.clone()) },
        }
    };
    InotifyFile { id, flags, fown: Fown::NONE, wd: inotify.watches.iter().map(watch).collect() }
}

fn ghosts(service: &Service) -> Result<Vec<ImageFile>> {
    let mut images = Vec::new();
    let mut remaps = Vec::new();
    for (number, ghost) in (1..).zip(&service.ghosts) {
        let attributes = &ghost.attributes;
        let message = GhostFile { uid: attributes.uid, gid: attributes.gid, mode: attributes.mode };
        let mut image = ImageFile::of(ghost_image(number), ImageType::GhostFile, &message)?;
        image.push_bytes(ghost.content.as_deref().unwrap_or_default());
        images.push(image);
        remaps.extend(ghost.files.iter().map(|file| RemapFilePath {
            orig_id: file.0,
            remap_id: number,
            remap_type: Some(GHOST),
        }));
    }
    images.push(ImageFile::of_all("remap-fpath", ImageType::RemapFilePath, remaps)?);
    Ok(images)
}

/// Returns the contents of pipes, of which both ends are files, once each.
fn pipes(files: &[File]) -> Result<[ImageFile; 2]> {
    let mut unnamed = BTreeMap::new();
    let mut named = BTreeMap::new();
    let none = Vec::new();
    for file in files {
        match file {
            // Packets are written later, each by itself.
            File::Pipe { inode, content, packets, capacity, .. } => {
                unnamed.insert(*inode, (if packets.is_empty() { content } else { &none }, *capacity))
            }
            File::Fifo { inode, content, capacity, .. } => named.insert(*inode, (content, *capacity)),
            _ => None,
        };
    }
    let image = |name, kind, pipes: BTreeMap<u32, (&Vec<u8>, u64)>| {
        let mut image = ImageFile::new(name, kind);
        for (pipe_id, (content, capacity)) in pipes {
            let (bytes, size) = (u32::try_from(content.len())?, u32::try_from(capacity)?);
            image.push(&PipeData { pipe_id, bytes, size: Some(size) })?;
            image.push_bytes(content);
        }
        anyhow::Ok(image)
    };
    Ok([image("pipes-data", ImageType::PipesData, unnamed)?, image("fifo-data", ImageType::FifoData, named)?])
}

fn memfds(files: &[File]) -> Result<ImageFile> {
    let mut inodes = BTreeMap::new();
    for file in files {
        if let File::Memfd { memfd, .. } = file {
            let &model::Memfd { inode, ref name, seals, uid, gid, size } = memfd;
            let (name, shmid) = (name.clone(), u32::try_from(inode)?);
            inodes.entry(inode).or_insert(MemfdInode { name, uid, gid, size, shmid, seals, inode_id: inode });
        }
    }
    ImageFile::of_all("memfd", ImageType::MemfdInode, inodes.into_values())
}

/// Returns the locks of all processes; one that several descriptors, or processes, show is there once.
fn locks(service: &Service) -> Result<ImageFile> {
    let mut image = ImageFile::new("filelocks", ImageType::FileLocks);
    let mut known = std::collections::HashSet::new();
    for process in &service.processes {
        let ProcessState::Running(running) = &process.state else { continue };
        for lock in &running.locks {
            let (flag, of_process) = match lock.kind {
                LockKind::Posix => (POSIX_LOCK, Some(process.pid)),
                LockKind::Flock => (FLOCK, None),
                LockKind::OpenFileDescription => (OFD_LOCK, None),
            };
            if known.insert((lock.owner, flag, of_process, lock.start)) {
                image.push(&m::FileLock {
                    flag,
                    r#type: lock.mode,
                    pid: i32::try_from(process.pid)?,
                    fd: i32::try_from(lock.fd)?,
                    start: i64::try_from(lock.start)?,
                    len: i64::try_from(lock.length)?,
                })?;
            }
        }
    }
    Ok(image)
}
