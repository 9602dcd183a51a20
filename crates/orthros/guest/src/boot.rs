//! The first steps of a guest's init: file systems, modules, network interfaces.

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use rustix::mount::{MountFlags, mount};

use crate::command::run;
use crate::kernel_parameters::parameter;
use crate::network::interface;
use crate::restore::tmpfs;

/// The source, target and type of each file system.
const MOUNTS: &[(&str, &str, &str)] = &[
    ("proc", "/proc", "proc"),
    ("sysfs", "/sys", "sysfs"),
    ("devtmpfs", "/dev", "devtmpfs"),
    ("devpts", "/dev/pts", "devpts"),
    ("tmpfs", "/dev/shm", "tmpfs"),
    ("tmpfs", "/run", "tmpfs"),
    ("tmpfs", "/tmp", "tmpfs"),
];

/// Whether sockets of `IPPROTO_MPTCP` can be opened; absent where the kernel has none.
const MULTIPATH_TCP: &str = "/proc/sys/net/mptcp/enabled";

pub(crate) fn prepare() -> Result<()> {
    for (source, target, kind) in MOUNTS {
        fs::create_dir_all(target).with_context(|| format!("cannot create {target}"))?;
        // Half of the memory would be the most otherwise, and images of a service may take more.
        let options = (*target == "/run").then_some(c"size=95%");
        mount(*source, *target, *kind, MountFlags::empty(), options)
            .with_context(|| format!("cannot mount {target}"))?;
    }
    // All systems have it, for locks that anyone makes (hier(7)).
    fs::DirBuilder::new().mode(0o1777).create("/run/lock").context("cannot create /run/lock")?;
    fs::set_permissions("/run/lock", fs::Permissions::from_mode(0o1777))
        .context("cannot open /run/lock to all")?;
    // SAFETY: no other thread runs yet that could read the environment.
    unsafe { std::env::set_var("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin") };
    let _ = Command::new("/bin/busybox").args(["--install", "-s", "/bin"]).status();
    let mut modules: Vec<PathBuf> = fs::read_dir("/modules")
        .map(|directory| directory.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default();
    modules.sort();
    for module in modules {
        // A module for a device that this guest lacks may refuse; what needs it will say so.
        if let Err(error) = load(&module) {
            eprintln!("orrery-guest: {error:#}");
        }
    }
    // No image has a connection of several paths. A program that asks for one gets plain TCP, where the kernel does not offer it.
    let _ = fs::write(MULTIPATH_TCP, "0");
    run(&["ip", "link", "set", "lo", "up"])?;
    if let Some(address) = parameter("orrery.address") {
        run(&["ip", "address", "add", &address, "dev", "eth0"])?;
        if parameter("orrery.role").as_deref() == Some("backup") {
            // The interface stays down: what arrives for the service waits in it until the connections are restored. To
            // create these, criu needs some route to the other side.
            interface::add_standby_route()?;
        } else {
            interface::bring_up()?;
            interface::add_default_route()?;
        }
    }
    // What is older came with the image; what is newer is the service's.
    let marker = format!("/{}", tmpfs::BOOT_MARKER.join("/"));
    fs::write(&marker, "").with_context(|| format!("cannot write {marker}"))
}

fn load(module: &Path) -> Result<()> {
    let bytes = fs::read(module)?;
    rustix::system::init_module(&bytes, &CString::default())
        .with_context(|| format!("cannot load {}", module.display()))
}
