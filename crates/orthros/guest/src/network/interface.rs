//! The network interface of a guest, and its default route.

use std::ffi::CStr;
use std::fs;
use std::os::fd::AsRawFd as _;

use anyhow::{Context as _, Result};

use crate::command::run;
use crate::kernel_parameters::parameter;

const INTERFACE: &CStr = c"eth0";
/// `IFF_UP` of `linux/if.h`.
const UP: libc::c_short = 1;

/// Brings the network interface up, if the guest has one.
pub(crate) fn bring_up() -> Result<()> {
    if parameter("orrery.address").is_none() {
        return Ok(());
    }
    // The kernel then announces which hardware address has this IP address now.
    let _ = fs::write("/proc/sys/net/ipv4/conf/eth0/arp_notify", "1");
    switch_on(INTERFACE)
}

/// Adds the default route that a guest has before its service changes anything.
pub(crate) fn add_default_route() -> Result<()> {
    match parameter("orrery.gateway") {
        Some(gateway) => run(&["ip", "route", "replace", "default", "via", &gateway, "dev", "eth0"]),
        None => Ok(()),
    }
}

/// Sets `IFF_UP`, netdevice(7). A program that does so would take ten times as long to start.
fn switch_on(name: &CStr) -> Result<()> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
    // SAFETY: all fields are integers or bytes, for which zero is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.to_bytes_with_nul()) {
        *to = from.cast_signed();
    }
    // SAFETY: `request` is a valid `ifreq` with a terminated name, and lives through both calls; SIOCGIFFLAGS fills in the
    // flags of the union before they are read.
    let result = unsafe {
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) == 0 {
            request.ifr_ifru.ifru_flags |= UP;
            libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request)
        } else {
            -1
        }
    };
    if result != 0 {
        let error = std::io::Error::last_os_error();
        return Err(error).with_context(|| format!("cannot bring {} up", name.to_string_lossy()));
    }
    Ok(())
}

/// Adds a route for a backup, whose interface is down.
pub(crate) fn add_standby_route() -> Result<()> {
    run(&["ip", "route", "add", "default", "dev", "lo"])
}

/// Removes the route of a backup.
pub(crate) fn remove_standby_route() {
    let _ = run(&["ip", "route", "delete", "default", "dev", "lo"]);
}
