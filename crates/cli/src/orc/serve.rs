//! `orrery orc serve`: the store.

use std::io::PipeReader;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use orrery_orc_client::{SOCKET, default_directory};
use orrery_orc_store::{
    Config, Executables, Launcher, NamedTrustDomain, Part, prove_disk, run as store, run_part as part,
};

/// Run the store: hold one copy of every object that programs register, until the end is asked for (SIGINT, SIGTERM).
///
/// Two processes do it. Each starts the other again when it dies; programs notice nothing.
#[derive(Args)]
pub(super) struct Arguments {
    /// The directory for the socket; programs find it as ORRERY_ORC [default: /run/orrery/orc, or
    /// $XDG_RUNTIME_DIR/orrery/orc]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// A socket with a trust domain of its own: its clients share with one another and with nobody else
    #[arg(long, value_name = "NAME=SOCKET", value_parser = named_domain)]
    trust_domain: Vec<NamedTrustDomain>,
    /// Bytes that each trust domain may have (K, M, G) [default: a quarter of --memory, 4G at most]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    quota: Option<u64>,
    /// Bytes that all trust domains may have together (K, M, G) [default: half of the machine's memory]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    memory: Option<u64>,
    /// Bytes of the largest object (K, M, G)
    #[arg(long, value_name = "BYTES", default_value = "1G", value_parser = bytes)]
    largest: u64,
    /// Objects that each trust domain may have
    #[arg(long, value_name = "COUNT", default_value_t = 65_536)]
    objects: usize,
    /// Connections that each trust domain may have at a time
    #[arg(long, value_name = "COUNT", default_value_t = 4_096)]
    connections: usize,
    /// Seconds for which objects stay that nobody holds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    keep: u64,
    /// What may become executable: never anything; files that nobody but their owner can write and that belong to root or the
    /// program's own user; any files; any bytes
    #[arg(long, value_name = "POLICY", default_value = "owned", value_parser = executables)]
    executables: Executables,
    /// A user, by number, who may make objects public, beside root and the store's own user
    #[arg(long, value_name = "UID")]
    publisher: Vec<u32>,
    /// A directory, on a disk of ext4, XFS or Btrfs, for objects that large files become: their pages come into memory as they
    /// are needed, not all at once
    #[arg(long, value_name = "DIR")]
    disk: Option<PathBuf>,
    /// Have code of 4 MiB and more in memory whole, where it gets huge pages, although other objects are files: measure whether
    /// it pays (make bench B=orc-huge)
    #[arg(long)]
    huge_pages: bool,
    /// The file of the host's secret, from which the places of libraries are derived; made where there is none
    /// [default: beside the directory: its path with `.secret`]
    #[arg(long, value_name = "FILE")]
    secret: Option<PathBuf>,
    /// A file to write down in what happens, one JSON object per line
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Bytes of the log (K, M, G), after which it is renamed to FILE.1 and begins again
    #[arg(long, value_name = "BYTES", default_value = "64M", value_parser = bytes)]
    log_size: u64,
}

#[derive(Args)]
pub(super) struct PartArguments {
    #[arg(value_parser = part_name)]
    part: Part,
}

fn part_name(text: &str) -> Result<Part, String> {
    [Part::Server, Part::Supervisor]
        .into_iter()
        .find(|part| part.name() == text)
        .ok_or_else(|| format!("there is no part {text:?}"))
}

fn named_domain(text: &str) -> Result<NamedTrustDomain, String> {
    match text.split_once('=') {
        Some((name, socket)) if !name.is_empty() && name.len() <= 64 && !socket.is_empty() => {
            Ok(NamedTrustDomain { name: name.to_owned(), socket: socket.into() })
        }
        _ => Err("write NAME=SOCKET, with a name of 1 to 64 bytes".to_owned()),
    }
}

fn executables(text: &str) -> Result<Executables, String> {
    match text {
        "never" => Ok(Executables::Never),
        "owned" => Ok(Executables::Owned),
        "files" => Ok(Executables::Files),
        "any" => Ok(Executables::Any),
        _ => Err("choose never, owned, files or any".to_owned()),
    }
}

fn bytes(text: &str) -> Result<u64, String> {
    match crate::units::size(text)? {
        0 => Err("nothing at all is too little".to_owned()),
        bytes => Ok(bytes),
    }
}

fn launcher() -> Launcher {
    Launcher { program: "/proc/self/exe".into(), arguments: vec!["orc".into(), "part".into()] }
}

/// Becomes readable when SIGINT or SIGTERM asks for the end.
fn stop() -> Result<PipeReader> {
    let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    let writer = std::sync::Mutex::new(Some(writer));
    ctrlc::set_handler(move || {
        if let Ok(mut writer) = writer.lock() {
            drop(writer.take());
        }
    })
    .context("cannot listen to signals")?;
    Ok(reader)
}

/// Returns where objects on disk are to be, if anywhere.
fn disk(arguments: &Arguments) -> Result<Option<PathBuf>> {
    let Some(directory) = &arguments.disk else { return Ok(None) };
    let directory = std::path::absolute(directory).context("cannot find the disk's directory")?;
    if let Err(error) = prove_disk(&directory) {
        eprintln!(
            "orrery orc: no objects can be made in {}: {error}; they lie elsewhere",
            directory.display()
        );
        return Ok(None);
    }
    Ok(Some(directory))
}

/// Returns the path of the secret, which must not be in the directory: containers get that.
fn beside(directory: &Path) -> Result<PathBuf> {
    // An older version had it there, where containers could read it.
    match std::fs::remove_file(directory.join("secret")) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            bail!("cannot remove the secret in {}: {error}; containers may read it", directory.display())
        }
        _ => {}
    }
    let mut name =
        directory.file_name().context("the store's directory cannot be the root directory")?.to_owned();
    name.push(".secret");
    Ok(directory.with_file_name(name))
}

/// Runs a store until it is told to stop.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let directory = arguments.directory.clone().unwrap_or_else(default_directory);
    let directory = std::path::absolute(directory).context("cannot find the working directory")?;
    let mut names: Vec<_> = arguments.trust_domain.iter().map(|named| &named.name).collect();
    names.sort();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        bail!("named {:?} was given twice: one socket each", twice[0]);
    }
    let mut named_domains = arguments.trust_domain.clone();
    for named in &mut named_domains {
        named.socket = std::path::absolute(&named.socket).context("cannot find the working directory")?;
    }
    let log = arguments
        .log
        .as_ref()
        .map(std::path::absolute)
        .transpose()
        .context("cannot find the log's directory")?;
    if let Some(log) = &log {
        // Better now than in a process that nobody hears.
        std::fs::File::options()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(log)
            .with_context(|| format!("cannot open the log {}", log.display()))?;
    }
    let disk = disk(arguments)?;
    let secret = match &arguments.secret {
        Some(secret) => std::path::absolute(secret).context("cannot find the secret's directory")?,
        None => beside(&directory)?,
    };
    let memory = arguments.memory.unwrap_or_else(|| Config::default().memory);
    let config = Config {
        socket: directory.join(SOCKET),
        named_domains,
        quota: arguments.quota.unwrap_or_else(|| Config::quota_of(memory)),
        memory,
        largest: arguments.largest,
        objects: arguments.objects.max(1),
        connections: arguments.connections.max(1),
        keep: arguments.keep,
        executables: arguments.executables,
        publishers: arguments.publisher.clone(),
        log,
        log_size: arguments.log_size,
        disk,
        huge: arguments.huge_pages,
        secret: Some(secret),
        ..Config::default()
    };
    let stop = stop()?;
    store(&config, &launcher(), stop.as_fd()).context("cannot run the store")
}

/// Does the work of one of the two processes.
pub(super) fn run_part(arguments: &PartArguments) -> Result<()> {
    let link: OwnedFd =
        rustix::io::dup(rustix::stdio::stdin()).context("cannot find the link to the other part")?;
    rustix::io::fcntl_setfd(&link, rustix::io::FdFlags::CLOEXEC)
        .context("cannot find the link to the other part")?;
    // The program was started through a name in /proc that says nothing.
    let name = match arguments.part {
        Part::Server => c"orc-server",
        Part::Supervisor => c"orc-supervisor",
    };
    rustix::thread::set_name(name).context("cannot name the process")?;
    let stop = stop()?;
    match arguments.part {
        Part::Server => {
            // An end that was asked for from the terminal is handled by the supervisor.
            rustix::process::setsid().ok();
            part(Part::Server, link, launcher(), stop.as_fd()).context("serve")
        }
        Part::Supervisor => {
            part(Part::Supervisor, link, launcher(), stop.as_fd()).context("cannot supervise the server")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        assert_eq!(bytes("4G"), Ok(4 << 30));
        assert_eq!(bytes("17"), Ok(17));
        assert_eq!(bytes("3k"), Ok(3072));
        for bad in ["", "G", "-1", "1X", "0", "99999999999999999999", "18446744073709551615K", "1.5M"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn named_trust_domains_have_sockets() {
        assert_eq!(named_domain("a=/run/a").map(|named| named.name), Ok("a".to_owned()));
        for bad in ["", "a", "=x", "a=", &format!("{}=x", "n".repeat(65))] {
            assert!(named_domain(bad).is_err(), "{bad}");
        }
    }
}
