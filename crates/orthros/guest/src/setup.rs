//! A guest's first steps: file systems, modules, the loopback interface.

use std::ffi::{CStr, CString};
use std::fs;
use std::io::{Read as _, Seek as _};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context as _, Result, bail};
use orrery_orthros_wire::Report;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mount::{MountFlags, mount};

const CARD: &CStr = c"eth0";
/// `IFF_UP` of `linux/if.h`.
const UP: libc::c_short = 1;
/// `(what, where, type)`.
const MOUNTS: &[(&str, &str, &str)] = &[
    ("proc", "/proc", "proc"),
    ("sysfs", "/sys", "sysfs"),
    ("devtmpfs", "/dev", "devtmpfs"),
    ("devpts", "/dev/pts", "devpts"),
    ("tmpfs", "/dev/shm", "tmpfs"),
    ("tmpfs", "/run", "tmpfs"),
    ("tmpfs", "/tmp", "tmpfs"),
];

pub(crate) fn prepare() -> Result<()> {
    for (what, place, kind) in MOUNTS {
        fs::create_dir_all(place).with_context(|| format!("cannot create {place}"))?;
        // Half of the memory would be the most otherwise, and images of a service may take more.
        let options = (*place == "/run").then_some(c"size=95%");
        mount(*what, *place, *kind, MountFlags::empty(), options)
            .with_context(|| format!("cannot mount {place}"))?;
    }
    // SAFETY: one thread runs yet.
    unsafe { std::env::set_var("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin") };
    let _ = Command::new("/bin/busybox").args(["--install", "-s", "/bin"]).status();
    let mut modules: Vec<PathBuf> = fs::read_dir("/modules")
        .map(|folder| folder.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default();
    modules.sort();
    for module in modules {
        // A module for a device that this guest lacks may refuse; what needs it will say so.
        if let Err(error) = load(&module) {
            eprintln!("orrery-guest: {error:#}");
        }
    }
    run(&["ip", "link", "set", "lo", "up"])?;
    if let Some(address) = parameter("orrery.address") {
        run(&["ip", "address", "add", &address, "dev", "eth0"])?;
        if parameter("orrery.role").as_deref() == Some("backup") {
            // The card stays off: what comes for the service waits in it until the connections are there. For them to be
            // made, there must be some way to the other side.
            run(&["ip", "route", "add", "default", "dev", "lo"])?;
        } else {
            go_online()?;
            find_way()?;
        }
    }
    // What is older came with the image; what is newer is the service's.
    let marker = format!("/{}", crate::elsewhere::MARKER.join("/"));
    fs::write(&marker, "").with_context(|| format!("cannot write {marker}"))
}

/// Switches the network card on.
pub(crate) fn go_online() -> Result<()> {
    if parameter("orrery.address").is_none() {
        return Ok(());
    }
    // The kernel then tells everyone whose card has this address now.
    let _ = fs::write("/proc/sys/net/ipv4/conf/eth0/arp_notify", "1");
    switch_on(CARD)
}

/// Makes the way to other networks known that a guest has before its service changes anything.
pub(crate) fn find_way() -> Result<()> {
    match parameter("orrery.gateway") {
        Some(gateway) => run(&["ip", "route", "replace", "default", "via", &gateway, "dev", "eth0"]),
        None => Ok(()),
    }
}

/// Switches a card on, netdevice(7); a program that does so would take ten times as long to start.
fn switch_on(name: &CStr) -> Result<()> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
    // SAFETY: the structure is integers and bytes, for which nothing is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.to_bytes_with_nul()) {
        *to = from.cast_signed();
    }
    // SAFETY: the request names a card, and is writable; the flags are what was just asked for.
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
        return Err(error).with_context(|| format!("cannot switch {} on", name.to_string_lossy()));
    }
    Ok(())
}

/// Takes back what only a backup needs.
pub(crate) fn leave_standby() {
    let _ = run(&["ip", "route", "delete", "default", "dev", "lo"]);
}

fn load(module: &Path) -> Result<()> {
    let bytes = fs::read(module)?;
    rustix::system::init_module(&bytes, &CString::default())
        .with_context(|| format!("cannot load {}", module.display()))
}

/// The value of a parameter of the kernel's command line.
pub(crate) fn parameter(name: &str) -> Option<String> {
    let line = fs::read_to_string("/proc/cmdline").ok()?;
    line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
}

/// Runs a program to its end, which must be a good one.
pub(crate) fn run(argv: &[&str]) -> Result<()> {
    let (status, output) = output(argv)?;
    if status != 0 {
        bail!("`{}` ended with {status}: {}", argv.join(" "), output.trim());
    }
    Ok(())
}

/// Runs a command to its end, and gives how it ended and what it printed. Not through pipes: whoever it leaves behind would hold
/// them, and be waited for.
pub(crate) fn run_to_exit(command: &mut Command) -> Result<(ExitStatus, String)> {
    let mut said = fs::File::from(memfd_create("said", MemfdFlags::CLOEXEC)?);
    command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said.try_clone()?);
    let program = command.get_program().display().to_string();
    let status = command.status().with_context(|| format!("cannot run {program}"))?;
    let mut bytes = Vec::new();
    said.rewind()?;
    said.read_to_end(&mut bytes)?;
    Ok((status, String::from_utf8_lossy(&bytes).trim().to_owned()))
}

/// Runs a program to its end, and gives how it ended and what it printed.
pub(crate) fn output<S: AsRef<std::ffi::OsStr>>(argv: &[S]) -> Result<(i32, String)> {
    let (program, arguments) = argv.split_first().context("nothing to run")?;
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("cannot run {}", program.as_ref().to_string_lossy()))?;
    let mut said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok((output.status.code().unwrap_or(-1), said))
}

/// Runs a program for the host, and returns the report about it.
pub(crate) fn run_for_host(argv: &[String]) -> Report {
    let (status, output) = output(argv).unwrap_or_else(|error| (-1, format!("{error:#}")));
    Report::Exited { status, output }
}
