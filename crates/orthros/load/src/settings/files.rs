//! Open files with owners, leases and packets, and an epoll that knows a file by a number that was closed.

use std::fs::{self, File};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::io::{dup, read, write};
use rustix::pipe::{PipeFlags, pipe_with};

use super::listing::Listing;

const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;
const F_GETOWN_EX: i32 = 16;

pub(super) struct Files {
    packets: (OwnedFd, OwnedFd),
    owned: (OwnedFd, OwnedFd),
    epoll: OwnedFd,
    leased: File,
    _event: OwnedFd,
}

fn fcntl(file: &OwnedFd, command: i32, argument: i32) -> Result<i32> {
    // SAFETY: the commands that are used here take an integer, or nothing.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
    ensure!(result >= 0, "fcntl {command}: {}", std::io::Error::last_os_error());
    Ok(result)
}

fn put_packets(writer: &OwnedFd) -> Result<()> {
    for packet in [&b"ab"[..], b"cde"] {
        write(writer, packet)?;
    }
    Ok(())
}

impl Files {
    pub(super) fn take() -> Result<Self> {
        let packets = pipe_with(PipeFlags::DIRECT | PipeFlags::CLOEXEC)?;
        put_packets(&packets.1)?;
        let owned = pipe_with(PipeFlags::CLOEXEC)?;
        fcntl(&owned.0, libc::F_SETOWN, rustix::process::getpid().as_raw_pid())?;
        fcntl(&owned.0, F_SETSIG, libc::SIGRTMIN() + 1)?;
        fcntl(&owned.0, libc::F_SETPIPE_SZ, 262_144)?;
        let event = eventfd(1, EventfdFlags::CLOEXEC)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let twin = dup(&event)?;
        epoll::add(&epoll, &twin, epoll::EventData::new_u64(77), epoll::EventFlags::IN)?;
        drop(twin);
        fs::write("/tmp/leased", "")?;
        let leased = File::open("/tmp/leased")?;
        // SAFETY: F_SETLEASE takes an integer, and no pointer.
        let result = unsafe { libc::fcntl(leased.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) };
        ensure!(result == 0, "no lease: {}", std::io::Error::last_os_error());
        Ok(Self { packets, owned, epoll, leased, _event: event })
    }

    pub(super) fn list(&self, listing: &mut Listing) -> Result<()> {
        let next = || -> Result<String> {
            let mut bytes = [0; 16];
            let length = read(&self.packets.0, &mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
        };
        let packets =
            [next()?, if rustix::io::ioctl_fionread(&self.packets.0)? > 0 { next()? } else { String::new() }];
        put_packets(&self.packets.1)?;
        listing.insert("packets of a pipe".to_owned(), packets.join(","));
        let mut owner = [0_i32; 2];
        // SAFETY: F_GETOWN_EX writes a structure of two integers.
        let result = unsafe { libc::fcntl(self.owned.0.as_raw_fd(), F_GETOWN_EX, owner.as_mut_ptr()) };
        listing.insert("owner of a file".to_owned(), format!("{result} {owner:?}"));
        listing.insert("signal of a file".to_owned(), fcntl(&self.owned.0, F_GETSIG, 0)?.to_string());
        listing.insert("size of a pipe".to_owned(), fcntl(&self.owned.0, libc::F_GETPIPE_SZ, 0)?.to_string());
        // SAFETY: F_GETLEASE takes no pointer.
        let lease = unsafe { libc::fcntl(self.leased.as_raw_fd(), libc::F_GETLEASE) };
        listing.insert("lease".to_owned(), lease.to_string());
        let mut events = Vec::with_capacity(4);
        let patience = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
        epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&patience))?;
        let data: Vec<u64> = events.iter().map(|event| event.data.u64()).collect();
        listing.insert("events of a closed number".to_owned(), format!("{data:?}"));
        list_descriptors(listing)
    }
}

/// Lists the numbers of all open files, and what `/proc` says about each.
fn list_descriptors(listing: &mut Listing) -> Result<()> {
    // That of the directory itself is gone by then.
    std::thread::sleep(Duration::from_millis(1));
    for entry in fs::read_dir("/proc/self/fd")?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        let link = link.to_string_lossy().into_owned();
        if link.starts_with("/proc/") {
            continue;
        }
        let Ok(info) = fs::read_to_string(format!("/proc/self/fdinfo/{name}")) else { continue };
        listing.insert(format!("file {name}"), unnumbered(&link));
        listing.insert(
            format!("file {name}: info"),
            info.lines().filter_map(line).collect::<Vec<_>>().join("; "),
        );
    }
    Ok(())
}

/// Returns a name without the number of an inode.
fn unnumbered(name: &str) -> String {
    name.split_once(":[").map_or(name, |(kind, _)| kind).to_owned()
}

/// Returns a line of `/proc/PID/fdinfo/N` without the numbers that each kernel chooses for itself; `None` if nothing else is in it.
fn line(line: &str) -> Option<String> {
    let anew = ["mnt_id:", "ino:", "eventfd-id:", "lock:"];
    if anew.iter().any(|name| line.starts_with(name)) {
        return None;
    }
    let words =
        line.split_whitespace().filter(|word| !word.starts_with("ino:") && !word.starts_with("sdev:"));
    Some(words.collect::<Vec<_>>().join(" "))
}
