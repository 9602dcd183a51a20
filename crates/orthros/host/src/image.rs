//! The image that both guests of a pair boot: init, criu, the service, and the modules for the machine's devices.
//!
//! Both boot the same image, so that programs and libraries are the same files under the same names on both sides: a
//! rebuilt process maps them again, and only its own pages have to be carried over.

use std::path::{Path, PathBuf};

use orrery_orthros_wire::{ExecConfig, SERVICE_DESCRIPTION, ServiceDescription};

use crate::command::{find, require, run};
use crate::error::{Error, Result};
use crate::initramfs::Initramfs;
use crate::kernel::KernelFiles;

/// What the devices of a pair, and criu, want of the kernel.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "virtio_net",
    "pvpanic-pci",
    "unix_diag",
    "inet_diag",
    "tcp_diag",
    "udp_diag",
    "netlink_diag",
    "af_packet_diag",
    "nf_tables",
    "tun",
    "veth",
];

/// What rules of netfilter want, where the image has the program that makes them. Those that translate addresses are left out: the
/// connections that they go with could not be carried over.
const RULES: &[&str] = &["nft_reject_inet", "nft_ct", "nft_limit", "nft_log"];
const RULES_BY: &str = "nft";

/// criu unlocks the network through these, once for each connection; nothing was locked that would want it.
const NOTHING: &str = "#!/bin/busybox sh\ncat > /dev/null 2>&1 < /dev/stdin\nexit 0\n";

/// criu runs a program at each of six stages of a restore, of which one concerns us. A shell without libraries looks which it
/// is: the guests' own program would take six times as long to start, each time, while the service is away.
const HOOK: &str =
    "#!/bin/busybox sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" != pre-resume ] || exec /usr/bin/orrery-guest\n";

/// The service that a pair runs, with what its image takes from this host.
#[derive(Clone, Debug, Default)]
pub struct Service {
    /// The program and its arguments; the program by its path on this host, or by a name to look for.
    pub argv: Vec<String>,
    /// More programs of this host that it runs.
    pub programs: Vec<String>,
    /// Files of this host that it needs, and the names under which it expects them.
    pub files: Vec<(PathBuf, String)>,
    /// Files and directories of this host that the image has under the same paths, with their owners and permissions; a
    /// directory without its contents.
    pub copied_paths: Vec<PathBuf>,
    /// Whether the image has this host's users and groups, and what else the C library looks up (names of hosts, ports, the time zone).
    pub host_users: bool,
    /// How the service is executed.
    pub exec: ExecConfig,
}

/// What the C library looks names, numbers and the time zone up in, in the image of a service that has this host's users.
const HOST_FILES: &[&str] = &[
    "/etc/passwd",
    "/etc/group",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/localtime",
    "/etc/nsswitch.conf",
    "/etc/protocols",
    "/etc/resolv.conf",
    "/etc/services",
];

/// Where guests mount file systems of their own, which begin empty or are the kernel's.
const HIDDEN: &[&str] = &["/dev", "/proc", "/run", "/sys", "/tmp", "/var/run"];

/// The name of the program of the guests, and where the image has it.
const GUEST: (&str, &str) = ("orrery-guest", "/usr/bin/orrery-guest");
/// The name of the load programs of tests and benchmarks, and where an image has them whose service names them.
const LOAD: (&str, &str) = ("orrery-orthros-load", "/usr/bin/orrery-orthros-load");

/// Returns the path of the guests' own program.
///
/// # Errors
///
/// [`Error::Helper`].
pub fn guest_program() -> Result<PathBuf> {
    find_helper(GUEST.0)
}

/// Returns the path of the load programs, which `orrery orthros soak` and tests run in guests.
///
/// # Errors
///
/// [`Error::Helper`].
pub fn load_program() -> Result<PathBuf> {
    find_helper(LOAD.0)
}

fn find_helper(name: &str) -> Result<PathBuf> {
    orrery_sys::programs::find_helper(name)
        .map_err(|error| Error::Helper { program: name.to_owned(), why: error.to_string() })
}

/// Adds a program of this build to an image. Of a debug build nine tenths are for debuggers, which the guest would unpack into its
/// memory.
fn add_own(image: &mut Initramfs, program: &Path, stripped: &Path, path: &str) -> Result<()> {
    let strip = find("strip").map(|strip| run(&strip, &[Path::new("-o"), stripped, program], None));
    image.program(if matches!(strip, Some(Ok(_))) { stripped } else { program }, path)?;
    Ok(())
}

/// Writes the image.
///
/// # Errors
///
/// [`Error::Missing`] where a program is not installed, [`Error::File`].
pub fn write_image(kernel: &KernelFiles, service: &Service, into: &Path) -> Result<()> {
    let mut image = Initramfs::new();
    let (guest, load) = (into.with_extension("guest"), into.with_extension("load"));
    add_own(&mut image, &guest_program()?, &guest, "/init")?;
    image.link(GUEST.1, "/init");
    image.program(&require("busybox", "busybox-static")?, "/bin/busybox")?;
    image.program(&require("criu", "criu")?, "/usr/sbin/criu")?;
    for name in ["iptables-restore", "ip6tables-restore"] {
        image.file(&format!("/usr/sbin/{name}"), NOTHING, 0o755);
    }
    image.file("/etc/orrery/hook", HOOK, 0o755);
    if service.host_users {
        for path in HOST_FILES.iter().filter(|path| Path::new(path).is_file()) {
            image.copy(Path::new(path), path);
        }
        // As all systems with units have it.
        image.link("/var/run", "/run").link("/var/lock", "/run/lock");
    } else {
        image.file("/etc/passwd", "root:x:0:0::/:/bin/sh\n", 0o644);
    }
    image.directory("/data");
    let programs = service.argv.first().into_iter().chain(&service.programs);
    if programs.clone().any(|program| program == LOAD.0) {
        add_own(&mut image, &load_program()?, &load, LOAD.1)?;
    }
    let mut argv = service.argv.clone();
    if let Some(first) = argv.first_mut() {
        *first = add_program(&mut image, first)?;
    }
    for program in &service.programs {
        add_program(&mut image, program)?;
    }
    for path in &service.copied_paths {
        visible(path)?;
        image.take(path)?;
    }
    for (from, to) in &service.files {
        visible(Path::new(to))?;
        image.tree(from, to, service.host_users)?;
    }
    let description = ServiceDescription { argv, exec: service.exec.clone() };
    let description =
        serde_json::to_vec(&description).map_err(|error| crate::error::file("write", into)(error.into()))?;
    image.file(SERVICE_DESCRIPTION, description, 0o600);
    let mut modules = MODULES.to_vec();
    let by = service.argv.first().into_iter().chain(&service.programs).map(Path::new);
    let by = by.chain(service.files.iter().map(|(_, to)| Path::new(to)));
    if by.chain(service.copied_paths.iter().map(PathBuf::as_path)).any(|path| path.ends_with(RULES_BY)) {
        modules.extend(RULES);
    }
    for (index, module) in kernel.modules(&modules)?.into_iter().enumerate() {
        image.file(&format!("/modules/{index:03}.ko"), module, 0o644);
    }
    image.write(into)?;
    for stripped in [guest, load] {
        // Absent where there is no `strip`, or no load.
        let _ = std::fs::remove_file(stripped);
    }
    Ok(())
}

/// Refuses a path in the image that the guest hides below a file system of its own.
fn visible(path: &Path) -> Result<()> {
    match HIDDEN.iter().find(|place| path.starts_with(place)) {
        Some(place) => Err(Error::Hidden { path: path.to_owned(), place: (*place).to_owned() }),
        None => Ok(()),
    }
}

/// Adds a program of this host under its own path, unless the image has it already, and returns its path in the image.
fn add_program(image: &mut Initramfs, program: &str) -> Result<String> {
    if let Some((_, path)) = [GUEST, LOAD].into_iter().find(|(name, _)| *name == program) {
        return Ok(path.to_owned());
    }
    let program = require(program, "the service's own package")?;
    visible(&program)?;
    let path = program.to_string_lossy().into_owned();
    image.program(&program, &path)?;
    Ok(path)
}
