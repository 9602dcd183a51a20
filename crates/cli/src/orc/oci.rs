//! `orrery orc oci`: containers that share, whatever starts them.
//!
//! Engines (containerd, Docker, Podman) start containers by an OCI runtime such as runc, which finds what to do in the
//! `config.json` of a *bundle* (<https://github.com/opencontainers/runtime-spec>). This stands in for the runtime: when a
//! container is to be created it adds the store's directory to the mounts and the auditor to the environment, and becomes the
//! runtime. A further process in a container (`exec`) gets the same environment. A hook could not do it, as hooks run when the
//! environment is settled.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use orrery_orc_auditor::container::{self, CODE_INSIDE, INSIDE};
use orrery_orc_client::{Client, SOCKET};
use orrery_orc_rootfs::{Content, Layout};

use super::rootfs::CONTENT;
use crate::oci_request::{self as request, Request, load, save};

/// The directory of a trust domain for containers.
const DEFAULT: &str = "/run/orrery/containers";

/// Stand in for an OCI runtime: containers that it creates share code and read-only data.
///
/// Name a script that calls this where the engine wants a runtime: `exec orrery orc oci -- "$@"`. Containers are in a trust domain of
/// their own: `orrery orc serve --trust-domain containers=/run/orrery/containers/socket`.
#[derive(Args)]
pub(super) struct Arguments {
    /// The directory of a trust domain for containers, with its socket and the auditor [default: /run/orrery/containers]
    #[arg(long, value_name = "DIR", default_value = DEFAULT, hide_default_value = true)]
    directory: PathBuf,
    /// The runtime that does the work
    #[arg(long, default_value = "runc")]
    runtime: PathBuf,
    /// Share all files of containers instead, by trees as `orrery orc rootfs` makes them: for every program, without an auditor
    #[arg(long)]
    rootfs: bool,
    /// The directory of the contents of such trees; the trees are beside it [default: /var/lib/orrery/content]
    #[arg(long, value_name = "DIR", default_value = CONTENT, hide_default_value = true)]
    content: PathBuf,
    /// What the engine tells the runtime
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Does it; returns only where it cannot.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    // A container that shares nothing is better than none.
    match request::read(&arguments.arguments) {
        Request::Create { bundle, container } => {
            let shared = if arguments.rootfs {
                share_root(&bundle, &container, &arguments.content)
            } else {
                share(&bundle, &arguments.directory)
            };
            if let Err(error) = shared {
                eprintln!("orrery orc oci: {}: the container shares nothing: {error:#}", bundle.display());
            }
        }
        Request::Execute { global, process, container } => {
            if let Err(error) = share_further(&arguments.runtime, &global, &process, &container) {
                eprintln!("orrery orc oci: {}: the process shares nothing: {error:#}", process.display());
            }
        }
        Request::Delete(container) => {
            let layout = tree_of(&container, &arguments.content);
            if let Some(layout) = layout.filter(|layout| layout.tree().exists()) {
                let status = Command::new(&arguments.runtime)
                    .args(&arguments.arguments)
                    .status()
                    .with_context(|| format!("cannot run {}", arguments.runtime.display()))?;
                if status.success() {
                    layout.remove()?;
                }
                std::process::exit(status.code().unwrap_or(1));
            }
        }
        Request::ExecuteWords | Request::Other(_) => {}
    }
    let error = Command::new(&arguments.runtime).args(&arguments.arguments).exec();
    bail!("run {}: {error}", arguments.runtime.display())
}

/// Checks that whoever can reach the directory is in a trust domain with a name, apart from the users of the host.
fn check_domain(directory: &Path) -> Result<()> {
    let report = Client::connect_to(directory)?.report()?;
    if report.trust_domain.starts_with("named ") {
        return Ok(());
    }
    bail!(
        "{} belongs to the host's users, whose objects root in a container would share; start the store with \
         --trust-domain containers={DEFAULT}/socket, and use --directory {DEFAULT}",
        directory.display()
    )
}

/// Adds what is needed to the bundle's configuration, once.
fn share(bundle: &Path, directory: &Path) -> Result<()> {
    let directory = directory
        .canonicalize()
        .with_context(|| format!("cannot find the store's directory {}", directory.display()))?;
    check_domain(&directory)?;
    let auditor = orrery_orc_auditor::find(&directory)
        .context("cannot find the auditor that the store has installed")?;
    let home = auditor.parent().context("cannot find the directory of the auditor")?;
    let for_loaders = orrery_orc_auditor::path_for_loaders(&auditor);
    let name = for_loaders.strip_prefix(home).context("cannot find the auditor in its directory")?;
    let path = bundle.join("config.json");
    let mut config = load(&path)?;
    let owner = std::fs::metadata(directory.join(SOCKET)).context("cannot find the store's socket")?.uid();
    if !container::has_number(&config, owner) {
        bail!(
            "the store's user {owner} has no number in its user namespace: it could not tell whose the store is"
        );
    }
    // In a directory of its own where no code can be run from the store's.
    let home = Some(home).filter(|home| *home != directory);
    let inside = if home.is_some() { CODE_INSIDE } else { INSIDE };
    container::edit(&mut config, &directory, home, &format!("{inside}/{}", name.display()))?;
    save(&path, &config)
}

/// Returns the paths of a container's tree.
fn tree_of(container: &OsStr, content: &Path) -> Option<Layout> {
    let name = container
        .to_str()
        .filter(|name| !name.is_empty() && !name.starts_with('.') && !name.contains('/'))?;
    Some(Layout::new(&content.parent()?.join("trees"), name))
}

/// Makes a tree of the container's root file system, which it has in place of it.
fn share_root(bundle: &Path, container: &OsStr, content: &Path) -> Result<()> {
    let bundle =
        bundle.canonicalize().with_context(|| format!("cannot find the bundle {}", bundle.display()))?;
    let path = bundle.join("config.json");
    let mut config = load(&path)?;
    let root = bundle.join(config["root"]["path"].as_str().unwrap_or("rootfs"));
    let is_writable = !config["root"]["readonly"].as_bool().unwrap_or(false);
    let layout = tree_of(container, content).context("the container's name cannot be that of a tree")?;
    // One of this name that nobody deleted.
    layout.remove()?;
    let mounted = layout.mount(&Content::open(content)?, &root, is_writable);
    let shared = mounted.map_err(anyhow::Error::from).and_then(|_| {
        container::set_root(&mut config, layout.tree())?;
        save(&path, &config)
    });
    if shared.is_err() {
        let _ = layout.remove();
    }
    shared
}

/// Adds what is needed to the description of a further process, if its container shares.
fn share_further(runtime: &Path, global: &[OsString], process: &Path, container: &OsStr) -> Result<()> {
    let state = request::state(runtime, global, container)?;
    let bundle = state["bundle"].as_str().context("the container has no bundle")?;
    let config = load(&Path::new(bundle).join("config.json"))?;
    let Some(auditor) = container::auditor(&config) else { return Ok(()) };
    let mut described = load(process)?;
    container::edit_process(&mut described, auditor)?;
    save(process, &described)
}
