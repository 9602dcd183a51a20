//! `orrery orthros up`: a pair in the foreground, for a service of the user's.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use clap::Args;
use orrery_orthros_host::{
    BridgeConfig, Cause, DiskConfig, DiskSource, Error, Fault, NetworkConfig, Pair, PairConfig, ServiceExit,
    cache,
};

use super::config::{DISKS, NETWORKS, Named, PairFile, Restart, Wanted, one};
use super::remote::{BACKUP, Lines};
use super::{Common, Story};

/// How long to wait before what failed for want of a resource is tried again.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(100);
/// How long to wait before a backup is tried again that could not be started.
const AGAIN: Duration = Duration::from_secs(10);

#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    common: Common,
    /// A file that describes the pair, instead of what follows
    #[arg(long, value_name = "FILE", conflicts_with_all = ["network", "bridge", "programs", "files", "disk", "append", "unit", "service"])]
    config: Option<PathBuf>,
    /// Take commands only from `orrery orthros status`, `crash`, `failover` and `down`, not from standard input
    #[arg(long)]
    quiet: bool,
    /// What to do when the service has exited: `no` ends the pair, with an error unless the service's status is 0
    #[arg(long, value_name = "WHEN", default_value = "no", conflicts_with = "config")]
    restart: Restart,
    /// Leave the dead machine's memory in the directory if the service cannot be rebuilt from it
    #[arg(long, requires = "directory")]
    keep: bool,
    /// Make a network namespace of this name with the service in it, at 10.77.0.2; enter it with `ip netns exec NAME`
    #[arg(long, value_name = "NAME")]
    network: Vec<String>,
    /// Give the service a place on a bridge of this host instead, at --address
    #[arg(long, value_name = "NAME", conflicts_with = "network", requires = "address")]
    bridge: Vec<String>,
    /// The service's address on the bridge, with the bits of its network: 192.168.1.7/24
    #[arg(long, value_name = "ADDRESS/BITS", requires = "bridge")]
    address: Vec<String>,
    /// Who knows the way from the bridge to other networks
    #[arg(long, value_name = "ADDRESS", requires = "bridge")]
    gateway: Option<String>,
    /// Another program of this host that the service runs, with its libraries; may be given several times
    #[arg(long = "program", value_name = "NAME")]
    programs: Vec<String>,
    /// A file or directory that the service needs, and where it expects it (where it is here, if :THERE is left out);
    /// may be given several times
    #[arg(long = "file", value_name = "HERE[:THERE]")]
    files: Vec<String>,
    /// A disk for the service, which survives with what was not written to it yet: the size of a new one (64M, 2G),
    /// or an image with an ext4 on it, which is changed
    #[arg(long, value_name = "SIZE|IMAGE")]
    disk: Vec<String>,
    /// Where the service expects its disk
    #[arg(long, value_name = "PATH", default_value = "/data", requires = "disk")]
    mount: String,
    /// A directory of this host whose files a new disk has
    #[arg(long, value_name = "DIRECTORY", requires = "disk")]
    content: Option<PathBuf>,
    /// More for the command line of the guests' kernel
    #[arg(long, value_name = "TEXT", default_value = "", allow_hyphen_values = true)]
    append: String,
    /// The service, by the name of its systemd unit (redis-server, NAME@INSTANCE) or the absolute path of a unit's
    /// file: started as the unit's files on this host say, with the files that they name
    #[arg(long, value_name = "UNIT", conflicts_with = "service")]
    unit: Option<String>,
    /// The service: a program of this host and its arguments. It sees its own program and libraries, and --file
    #[arg(required_unless_present_any = ["config", "unit"], trailing_var_arg = true)]
    service: Vec<String>,
}

/// Returns the pair that the arguments, or the file they name, describe.
fn wanted(arguments: &Arguments) -> Result<Wanted> {
    if let Some(path) = &arguments.config {
        return PairFile::read(path);
    }
    let mut files = Vec::new();
    for file in &arguments.files {
        let (here, there) = file.split_once(':').unwrap_or((file, file));
        ensure!(there.starts_with('/'), "--file {file}: write HERE:THERE, where THERE is an absolute path");
        files.push((PathBuf::from(here), there.to_owned()));
    }
    let disk = match one(DISKS, arguments.disk.clone())? {
        Some(text) => {
            let source = DiskSource::parse(&text).map_err(anyhow::Error::msg)?;
            Some(DiskConfig { source, mount: arguments.mount.clone(), content: arguments.content.clone() })
        }
        None => None,
    };
    let own = one(NETWORKS, arguments.network.clone())?;
    let place = (one(NETWORKS, arguments.bridge.clone())?, one(NETWORKS, arguments.address.clone())?);
    let network = match place {
        (Some(bridge), Some(address)) => {
            let place = BridgeConfig::parse(&bridge, &address, arguments.gateway.as_deref());
            Some(NetworkConfig::Bridge(place.map_err(anyhow::Error::msg)?))
        }
        _ => own.map(NetworkConfig::Own),
    };
    let named = Named { unit: arguments.unit.as_deref(), argv: arguments.service.clone() };
    let (service, report) = named.service(disk.as_ref(), arguments.programs.clone(), files)?;
    Ok(Wanted {
        service,
        report,
        memory_mib: arguments.common.memory,
        cpus: arguments.common.cpus,
        silence: Duration::from_secs_f64(arguments.common.silence),
        network,
        directory: None,
        disk,
        append: arguments.append.clone(),
        restart: arguments.restart,
    })
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let wanted = wanted(arguments)?;
    let mut story = Story::new(arguments.common.json);
    let temporary = tempfile::tempdir()?;
    let directory = arguments.common.directory.clone().or(wanted.directory);
    let directory = directory.unwrap_or_else(|| temporary.path().to_owned());
    let lines = Lines::listen(&directory, arguments.quiet)?;
    let place = match &wanted.network {
        Some(NetworkConfig::Own(name)) => format!(" in network {name}"),
        Some(NetworkConfig::Bridge(place)) => format!(" on bridge {}", place.bridge),
        None => String::new(),
    };
    for text in &wanted.report {
        story.tell("unit", None, text)?;
    }
    let mut pair = Pair::start(PairConfig {
        directory,
        cache: cache(),
        service: wanted.service,
        memory_mib: wanted.memory_mib,
        cpus: wanted.cpus,
        silence: wanted.silence,
        network: wanted.network,
        disk: wanted.disk,
        append: wanted.append,
    })?;
    let at = pair.network().map(|network| format!(" at {}{place}", network.address()));
    story.tell("armed", None, format!("the service runs{}", at.unwrap_or_default()))?;
    warn(&mut pair, &story)?;
    story.tell(
        "help",
        None,
        "commands: status, crash [KIND], crash backup [KIND], failover, run PROGRAM ARGUMENTS, quit",
    )?;
    // How many lost backups were report of, when the next one is due, and whether someone waits for it.
    let (mut report, mut due, mut awaited) = (0, Instant::now(), false);
    let mut full: Option<PathBuf> = None;
    let mut exits = Exits::default();
    let mut unwatched: Option<String> = None;
    loop {
        let mut cause = match pair.watch(Duration::from_millis(100)) {
            Err(error @ Error::Guest { .. }) => {
                // It was report to die, and could not.
                story.tell("failed", None, error.to_string())?;
                story.hang_up();
                None
            }
            // Its heartbeats could not be read, say. The service runs, and is watched again when that has passed.
            Err(error) => {
                let text = format!("cannot watch the service: {error}; it is tried again");
                if unwatched.as_ref() != Some(&text) {
                    story.tell("unwatched", None, &text)?;
                    unwatched = Some(text);
                }
                std::thread::sleep(SHORTAGE_PAUSE);
                None
            }
            Ok(cause) => {
                unwatched = None;
                cause
            }
        };
        if let Some(exit) = exits.next(pair.service_exit()) {
            story.tell("exited", None, format!("the service {exit}"))?;
            if !exit.is_in_background() {
                if !wanted.restart.applies(&exit) || exits.are_too_many() {
                    pair.stop()?;
                    story.tell("end", None, "both machines are stopped")?;
                    ensure!(exit.status == Some(0), "the service {exit}{}", exits.limit());
                    return Ok(());
                }
                pair.restart()?;
                exits.restarted();
                story.tell("restarted", None, "the service was started again")?;
                due = stand_by(&mut pair, &story)?;
                report = pair.lost_backups().len();
                continue;
            }
        }
        if pair.full_disk() != full.as_deref() {
            full = pair.full_disk().map(Path::to_owned);
            match &full {
                Some(image) => story.tell("full", None, full_disk(image))?,
                None => story.tell("room", None, "there is room again, and the service goes on")?,
            }
        }
        let lives = pair.backup_is_alive();
        let news = pair.lost_backups().get(report..).and_then(<[String]>::last).cloned();
        if cause.is_none() && !lives && (news.is_some() || Instant::now() >= due) {
            if let Some(why) = news {
                let text = format!("the backup has died ({why}); a new one is started");
                story.tell("backup died", None, text)?;
            }
            due = stand_by(&mut pair, &story)?;
            report = pair.lost_backups().len();
            if std::mem::take(&mut awaited) {
                story.hang_up();
            }
        }
        while let Some(line) = lines.next() {
            let words: Vec<&str> = line.text.split_whitespace().collect();
            let mut listener = line.from;
            match words[..] {
                [] => {}
                ["quit"] => {
                    story.listen(listener);
                    pair.stop()?;
                    return story.tell("end", None, "both machines are stopped");
                }
                ["failover"] => {
                    story.listen(listener.take());
                    cause = Some(Cause::Request);
                }
                ["crash", BACKUP, ref kind @ ..] if kind.len() < 2 => {
                    story.listen(listener.take());
                    if crash(&mut pair, &story, kind.first().copied(), Pair::crash_backup)? {
                        awaited = true;
                    } else {
                        story.hang_up();
                    }
                }
                ["crash", ref kind @ ..] if kind.len() < 2 => {
                    story.listen(listener.take());
                    if !crash(&mut pair, &story, kind.first().copied(), Pair::crash)? {
                        story.hang_up();
                    }
                }
                _ => {
                    story.listen(listener.take());
                    answer(&mut pair, &story, &words)?;
                    story.hang_up();
                }
            }
        }
        if let Some(cause) = cause {
            story.tell("died", None, format!("the active is given up: {}", describe(cause)))?;
            if survive(&mut pair, &story, cause, arguments.keep)? {
                if let Some(whole) = pair.wait_for_lazy_pages()? {
                    let mib = whole.pages / 256;
                    let text = format!(
                        "the last {mib} MiB of its memory came {:.0} ms after it lived again",
                        whole.seconds * 1e3
                    );
                    story.tell("whole", Some(whole.seconds), text)?;
                }
                due = stand_by(&mut pair, &story)?;
                report = pair.lost_backups().len();
            }
            story.hang_up();
        }
    }
}

/// The exits of a service, and how often it was started again.
struct Exits {
    last: Option<ServiceExit>,
    started: Instant,
    /// How many times in a row it has exited soon after it was started.
    soon: u32,
}

impl Default for Exits {
    fn default() -> Self {
        Self { last: None, started: Instant::now(), soon: 0 }
    }
}

impl Exits {
    /// A service that exits within this time, `MOST` times in a row, is not started again; systemd has the same limits.
    const SOON: Duration = Duration::from_secs(10);
    const MOST: u32 = 5;

    /// Returns an exit that was not seen before.
    fn next(&mut self, exit: Option<ServiceExit>) -> Option<ServiceExit> {
        let new = exit.filter(|exit| self.last.as_ref() != Some(exit))?;
        self.last = Some(new.clone());
        if !new.is_in_background() {
            self.soon = if self.started.elapsed() < Self::SOON { self.soon + 1 } else { 0 };
        }
        Some(new)
    }

    /// Notes that the service was started again.
    fn restarted(&mut self) {
        (self.last, self.started) = (None, Instant::now());
    }

    fn are_too_many(&self) -> bool {
        self.soon >= Self::MOST
    }

    /// Returns what an error adds where the service was not started again for this limit.
    fn limit(&self) -> String {
        if !self.are_too_many() {
            return String::new();
        }
        format!(", {} times in a row within {} s of its start", Self::MOST, Self::SOON.as_secs())
    }
}

/// Returns what is to be done where the service stands still.
/// Returns why a failover begins, in words.
fn describe(cause: Cause) -> &'static str {
    match cause {
        Cause::Panic => "its kernel panicked",
        Cause::Silence => "a processor is silent",
        Cause::Killed => "its machine has ended",
        Cause::Request => "on request",
    }
}

fn full_disk(image: &Path) -> String {
    format!(
        "this host has no room for what the service writes to {}: it stands still, and goes on when there is room",
        image.display()
    )
}

/// Starts a new backup. That none can be had is no reason to end a service that runs; gives when it is time to try
/// again.
fn stand_by(pair: &mut Pair, story: &Story) -> Result<Instant> {
    match pair.start_backup() {
        Ok(seconds) => {
            story.tell("renewed", Some(seconds), format!("a new backup stands by after {seconds:.1} s"))?;
            warn(pair, story)?;
        }
        Err(error) => {
            let again = AGAIN.as_secs();
            let text = format!(
                "no backup stands by: {error}; the service runs, and would not survive; it is tried again in {again} s"
            );
            story.tell("alone", None, text)?;
        }
    }
    Ok(Instant::now() + AGAIN)
}

/// Says early that the backup is too small for what the service has become.
fn warn(pair: &mut Pair, story: &Story) -> Result<()> {
    match pair.estimate_memory() {
        Some(memory_estimate) if !memory_estimate.fits() => {
            let text = format!("{memory_estimate}: it would not survive; give the machines more (--memory)");
            story.tell("short", None, text)
        }
        _ => Ok(()),
    }
}

/// Answers what changes nothing.
fn answer(pair: &mut Pair, story: &Story, words: &[&str]) -> Result<()> {
    match words {
        ["status"] => story.tell_status(&pair.status()),
        ["run", argv @ ..] if !argv.is_empty() => match pair.run(argv) {
            Ok(output) => story.tell("ran", None, output.trim_end()),
            Err(error) => story.tell("failed", None, error.to_string()),
        },
        _ => {
            let line = words.join(" ");
            let text =
                format!("no command is {line:?}; there are status, crash, crash backup, failover, run, quit");
            story.tell("help", None, text)
        }
    }
}

/// Lets one of the machines die; says why not where it cannot.
fn crash(
    pair: &mut Pair,
    story: &Story,
    kind: Option<&str>,
    way: fn(&mut Pair, Fault) -> orrery_orthros_host::Result<()>,
) -> Result<bool> {
    let done = Fault::parse(kind.unwrap_or("panic"))
        .and_then(|fault| way(pair, fault).map_err(|error| error.to_string()));
    match done {
        Ok(()) => Ok(true),
        Err(why) => story.tell("failed", None, why).map(|()| false),
    }
}

/// Fails over; what was only asked for and cannot be done leaves the service where it is, which is report.
fn survive(pair: &mut Pair, story: &Story, cause: Cause, keep: bool) -> Result<bool> {
    // The memory is only read, so what failed may be tried again.
    let mut tries = if cause == Cause::Request { 3 } else { 2 };
    loop {
        tries -= 1;
        let error = match pair.fail_over(cause) {
            Ok(failover) => return story.tell_failover(&failover).map(|()| true),
            Err(error) => error,
        };
        let gone = matches!(error, Error::Gone { .. });
        if tries > 0 && !gone {
            story.tell("again", None, format!("{error}; trying again"))?;
        } else if pair.active_is_alive() {
            story.tell("failed", None, format!("the service stays where it is: {error}"))?;
            return Ok(false);
        } else {
            let kept = if keep {
                match pair.preserve_memory() {
                    Ok(path) => format!("; the dead memory is {}", path.display()),
                    Err(error) => format!("; its memory is lost: {error}"),
                }
            } else {
                String::new()
            };
            story.tell("failed", None, format!("the service could not be rebuilt: {error}{kept}"))?;
            bail!("the service could not be rebuilt: {error}{kept}");
        }
    }
}
