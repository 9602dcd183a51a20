//! Devices, and programs that Orrery starts: what orthros stands on.

use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use linux_raw_sys::ioctl::TUNSETIFF;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Access, CWD, Mode, OFlags, access, openat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use syscalls::{Sysno, syscall};

use crate::child::{During, Note, Verdict, expect};
use crate::facility::{Group, State, System};
use crate::namespaces::enter_own_network;
use crate::row::{Family, Probe, Row};
use crate::tools::owned;

const ORTHROS: &[System] = &[System::Orthros];

pub(crate) const FAMILY: Family = Family {
    group: Group::Machine,
    rows: &[
        Row {
            name: "qemu",
            systems: ORTHROS,
            purpose: "runs the active and the backup kernel",
            fallback: "none: orthros says which package to install",
            probe: Probe::Here(|limit| program(QEMU, limit)),
        },
        Row {
            name: "kvm",
            systems: ORTHROS,
            purpose: "both kernels run at the processor's own speed",
            fallback: "QEMU translates (TCG): correct, several times slower",
            probe: Probe::Child(kvm),
        },
        Row {
            name: "criu",
            systems: ORTHROS,
            purpose: "restores processes from images; on this host, the rival and the oracle for them",
            fallback: "the guests bring their own; comparisons on this host are left out",
            probe: Probe::Here(|limit| program("criu", limit)),
        },
        Row {
            name: "tun",
            systems: ORTHROS,
            purpose: "network interfaces of the two kernels, joined to a bridge",
            fallback: "QEMU's user-mode network: connections reach the guests through forwarded ports",
            probe: Probe::Child(tun),
        },
        Row {
            name: "bridge",
            systems: ORTHROS,
            purpose: "the survivor answers at the dead kernel's place in the network",
            fallback: "a bridge that is given, else QEMU's user-mode network",
            probe: Probe::Child(bridge),
        },
    ],
};

#[cfg(target_arch = "x86_64")]
const QEMU: &str = "qemu-system-x86_64";
#[cfg(target_arch = "aarch64")]
const QEMU: &str = "qemu-system-aarch64";

/// Looks a program up in `PATH` and lets it tell its version.
fn program(name: &str, limit: Duration) -> State {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(name));
    let Some(program) =
        found.into_iter().find(|file| access(file, Access::EXEC_OK).is_ok() && file.is_file())
    else {
        return State::missing(format!("no {name} in PATH"));
    };
    match version(&program, limit) {
        Ok(version) => State::available(version),
        Err(reason) => State::missing(format!("{} --version: {reason}", program.display())),
    }
}

/// Returns the first line of what `--version` prints.
fn version(program: &PathBuf, limit: Duration) -> Result<String, String> {
    let deadline = Instant::now() + limit;
    let mut child = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| error.to_string())?;
    let output = child.stdout.take().map(|output| read_until(&output, deadline)).unwrap_or_default();
    // It has told what we want, or its time is up.
    let _ = child.kill();
    let _ = child.wait();
    let text = String::from_utf8_lossy(&output);
    match text.lines().next().map(str::trim) {
        Some(line) if !line.is_empty() => Ok(line.to_owned()),
        _ => Err("no answer".to_owned()),
    }
}

/// Returns the first line that arrives before the deadline.
fn read_until(output: &impl AsFd, deadline: Instant) -> Vec<u8> {
    let mut text = Vec::new();
    let mut chunk = [0; 512];
    while !text.contains(&b'\n') {
        let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).unwrap_or_default();
        match poll(&mut [PollFd::new(output, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => continue,
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
        match rustix::io::read(output, &mut chunk) {
            Ok(0) | Err(_) => break,
            Ok(len) => text.extend_from_slice(chunk.get(..len).unwrap_or_default()),
        }
    }
    text
}

fn kvm(note: &mut Note) -> Verdict {
    const KVM_GET_API_VERSION: u32 = 0xae00;
    const KVM_CREATE_VM: u32 = 0xae01;
    let device =
        openat(CWD, c"/dev/kvm", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).during("open /dev/kvm")?;
    // SAFETY: this ioctl takes no pointer and changes nothing.
    let version = unsafe { syscall!(Sysno::ioctl, device.as_raw_fd(), KVM_GET_API_VERSION, 0) }
        .during("KVM_GET_API_VERSION")?;
    // SAFETY: it makes a descriptor, which is ours alone.
    unsafe { owned(syscall!(Sysno::ioctl, device.as_raw_fd(), KVM_CREATE_VM, 0)) }.during("KVM_CREATE_VM")?;
    note.say(format_args!("API {version}"));
    Ok(())
}

fn tun(note: &mut Note) -> Verdict {
    const IFF_TAP: libc::c_short = 2;
    const IFF_NO_PI: libc::c_short = 0x1000;
    if enter_own_network(note).is_err() {
        // The interface goes with its descriptor, so it may just as well be tried where we are.
        note.say(format_args!("in this network"));
    }
    let device = openat(CWD, c"/dev/net/tun", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .during("open /dev/net/tun")?;
    // SAFETY: all-zero is a valid request: the kernel chooses the name.
    let mut request: libc::ifreq = unsafe { zeroed() };
    request.ifr_ifru.ifru_flags = IFF_TAP | IFF_NO_PI;
    // SAFETY: the kernel reads and writes a `struct ifreq`; the interface is gone with the descriptor.
    unsafe { syscall!(Sysno::ioctl, device.as_raw_fd(), TUNSETIFF, &raw mut request) }.during("TUNSETIFF")?;
    expect(request.ifr_name[0] != 0, "the new interface has no name")
}

fn bridge(note: &mut Note) -> Verdict {
    const SIOCBRADDBR: u32 = 0x89a0;
    const SIOCBRDELBR: u32 = 0x89a1;
    enter_own_network(note)?;
    let socket =
        socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None).during("socket")?;
    let name: &[u8; libc::IFNAMSIZ] = b"orreryprobe\0\0\0\0\0";
    // SAFETY: the kernel reads IFNAMSIZ bytes at most, which the array has, and which outlive the call.
    unsafe { syscall!(Sysno::ioctl, socket.as_raw_fd(), SIOCBRADDBR, name.as_ptr()) }
        .during("SIOCBRADDBR")?;
    // SAFETY: the kernel reads IFNAMSIZ bytes, which the array has.
    unsafe { syscall!(Sysno::ioctl, socket.as_raw_fd(), SIOCBRDELBR, name.as_ptr()) }
        .during("SIOCBRDELBR")
        .map(drop)
}
