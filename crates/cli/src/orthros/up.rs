//! `orrery orthros up`: a pair in the foreground, for a service of the user's.

use std::io::BufRead as _;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use orrery_orthros::{Cause, DiskConfig, DiskSource, Network, Pair, PairConfig, Service, cache};

use super::{Common, Story};

#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Make a network namespace of this name with the service in it, at 10.77.0.2; enter it with `ip netns exec NAME`
    #[arg(long, value_name = "NAME")]
    network: Option<String>,
    /// A file that the service needs, and where it expects it; may be given several times
    #[arg(long = "file", value_name = "HERE:THERE")]
    files: Vec<String>,
    /// A disk for the service, which survives with what was not written to it yet: the size of a new one (64M, 2G),
    /// or an image with an ext4 on it, which is changed
    #[arg(long, value_name = "SIZE|IMAGE", value_parser = DiskSource::parse)]
    disk: Option<DiskSource>,
    /// Where the service expects its disk
    #[arg(long, value_name = "PATH", default_value = "/data", requires = "disk")]
    mount: String,
    /// A folder of this host whose files a new disk has
    #[arg(long, value_name = "FOLDER", requires = "disk")]
    content: Option<PathBuf>,
    /// The service: a program of this host and its arguments. It sees its own program and libraries, and --file
    #[arg(required = true, trailing_var_arg = true)]
    service: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let common = &arguments.common;
    let story = Story::new(common.json);
    let temporary = tempfile::tempdir()?;
    let mut files = Vec::new();
    for file in &arguments.files {
        let (here, there) =
            file.split_once(':').with_context(|| format!("--file {file}: write HERE:THERE"))?;
        files.push((PathBuf::from(here), there.to_owned()));
    }
    let disk = arguments.disk.clone().map(|source| DiskConfig {
        source,
        mount: arguments.mount.clone(),
        content: arguments.content.clone(),
    });
    let config = PairConfig {
        folder: common.folder.clone().unwrap_or_else(|| temporary.path().to_owned()),
        cache: cache(),
        service: Service { argv: arguments.service.clone(), files },
        memory_mib: common.memory,
        cpus: 1,
        network: arguments.network.clone(),
        disk,
    };
    let lines = commands();
    let mut pair = Pair::up(config)?;
    let address =
        arguments.network.as_ref().map(|name| format!(" at {} in network {name}", Network::SERVICE));
    story.tell("armed", None, format!("the service runs{}", address.unwrap_or_default()))?;
    story.tell("help", None, "commands: status, crash, failover, run PROGRAM ARGUMENTS, quit")?;
    loop {
        let mut cause = pair.watch(Duration::from_millis(100))?;
        while let Ok(line) = lines.try_recv() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                [] => {}
                ["quit"] => {
                    pair.down()?;
                    return story.tell("end", None, "both machines are stopped");
                }
                ["status"] => story.tell("status", None, status(&pair))?,
                ["crash"] => pair.crash("panic")?,
                ["failover"] => cause = Some(Cause::Request),
                ["run", ref argv @ ..] if !argv.is_empty() => match pair.run(argv) {
                    Ok(output) => story.tell("ran", None, output.trim_end())?,
                    Err(error) => story.tell("failed", None, error.to_string())?,
                },
                _ => story.tell(
                    "help",
                    None,
                    format!("no command is {line:?}; there are status, crash, failover, run, quit"),
                )?,
            }
        }
        if let Some(cause) = cause {
            story.tell("died", None, format!("the active is given up: {cause:?}"))?;
            // The memory is only read, so what failed may be tried again.
            let failover = match pair.fail_over(cause) {
                Ok(failover) => failover,
                Err(error) => {
                    story.tell("failed", None, format!("{error}; trying again"))?;
                    match pair.fail_over(cause) {
                        Ok(failover) => failover,
                        Err(error) => bail!("the service could not be rebuilt: {error}"),
                    }
                }
            };
            story.tell_failover(&failover)?;
            let seconds = pair.renew()?;
            story.tell("renewed", Some(seconds), format!("a new backup stands by after {seconds:.1} s"))?;
        }
    }
}

fn status(pair: &Pair) -> String {
    let backup = pair
        .backup()
        .map_or_else(|| "none".to_owned(), |backup| format!("{} (pid {})", backup.name(), backup.pid()));
    let active = pair.active();
    format!(
        "active {} (pid {}), backup {backup}, service {} in its guest",
        active.name(),
        active.pid(),
        pair.pid()
    )
}

/// The lines of standard input; its end is `quit`, so that nothing is left behind.
fn commands() -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(std::result::Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
        let _ = sender.send("quit".to_owned());
    });
    receiver
}
