//! Commands to a pair that runs: lines of text over a socket in its directory, answered with events.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use orrery_orthros_host::{Fault, Status};
use serde_json::Value;

/// The name of the socket in the directory of a pair.
pub(crate) const SOCKET: &str = "commands";
/// What `crash` is followed by where it is the backup that is to die.
pub(super) const BACKUP: &str = "backup";

/// How long to wait before what failed for want of a resource is tried again.
const SHORTAGE_PAUSE: std::time::Duration = std::time::Duration::from_millis(100);
/// Bytes of the longest status.
const LONGEST: u64 = 1 << 20;
/// How often in a row standard input may fail.
const MOST_FAILURES: u32 = 50;

/// How a program ends that an interruption ended at once, as a shell would tell it.
pub(super) const INTERRUPTED: i32 = 128 + libc::SIGINT;

/// A line that someone said, and who listens to the answer.
pub(super) struct Line {
    pub(super) text: String,
    pub(super) from: Option<UnixStream>,
}

/// What is said to a pair: on standard input, and over the socket in its directory.
pub(super) struct Lines {
    receiver: Receiver<Line>,
    socket: PathBuf,
}

impl Lines {
    /// Listens in a directory, where only one pair can be, and to standard input unless it is `quiet`.
    pub(super) fn listen(directory: &Path, quiet: bool) -> Result<Self> {
        std::fs::create_dir_all(directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        let socket = directory.join(SOCKET);
        if UnixStream::connect(&socket).is_ok() {
            bail!("another pair runs in {}", directory.display());
        }
        let _ = std::fs::remove_file(&socket);
        let listener =
            UnixListener::bind(&socket).with_context(|| format!("cannot listen at {}", socket.display()))?;
        let (sender, receiver) = channel();
        // Without an end in order its network would stay, and the next pair find its name taken.
        let (signalled, mut again) = (sender.clone(), false);
        ctrlc::set_handler(move || {
            if std::mem::replace(&mut again, true) {
                std::process::exit(INTERRUPTED);
            }
            let _ = signalled.send(Line { text: "quit".to_owned(), from: None });
        })
        .context("cannot listen to signals")?;
        if !quiet {
            let sender = sender.clone();
            std::thread::spawn(move || input(&sender));
        }
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // Who comes next is served when there are descriptors again.
                let Ok(stream) = stream else {
                    std::thread::sleep(SHORTAGE_PAUSE);
                    continue;
                };
                let sender = sender.clone();
                // Where no thread is to be had, it is told so by the end of its connection.
                let _ = std::thread::Builder::new().spawn(move || {
                    let mut text = String::new();
                    let Ok(copy) = stream.try_clone() else { return };
                    if BufReader::new(copy).read_line(&mut text).is_ok() {
                        let _ = sender.send(Line { text, from: Some(stream) });
                    }
                });
            }
        });
        Ok(Self { receiver, socket })
    }

    pub(super) fn next(&self) -> Option<Line> {
        self.receiver.try_recv().ok()
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// The lines of standard input; its end is `quit`, so that nothing is left behind.
fn input(sender: &Sender<Line>) {
    let mut failures = 0;
    for text in std::io::stdin().lock().lines() {
        match text {
            Ok(text) => {
                failures = 0;
                if sender.send(Line { text, from: None }).is_err() {
                    return;
                }
            }
            // Want of memory passes, and is no reason to end a service; a terminal that was hung up stays so.
            Err(_) if failures < MOST_FAILURES => {
                failures += 1;
                std::thread::sleep(SHORTAGE_PAUSE);
            }
            Err(_) => break,
        }
    }
    let _ = sender.send(Line { text: "quit".to_owned(), from: None });
}

/// Where the pair is.
#[derive(Args)]
pub(crate) struct Target {
    /// The directory that `up` was given
    #[arg(long)]
    directory: PathBuf,
    /// Print one JSON object for each event
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub(crate) struct Crash {
    #[command(flatten)]
    target: Target,
    /// How: panic, oops (a wild pointer), oom, nmi, hang (a processor halts with interrupts off), spin (one runs in
    /// circles within the kernel), lockup (the same, and the kernel panics when it notices)
    #[arg(long, default_value = "panic", value_parser = Fault::parse)]
    kind: Fault,
    /// Let the backup's kernel die instead, and wait until a new one stands by
    #[arg(long)]
    backup: bool,
}

pub(super) fn crash(arguments: &Crash) -> Result<()> {
    let who = if arguments.backup { format!("{BACKUP} ") } else { String::new() };
    say(&arguments.target, &format!("crash {who}{}", arguments.kind.name()))
}

/// Returns the status of the pair that listens at a socket, and the process that listens.
///
/// # Errors
/// No pair listens, it ends meanwhile, or it is of another version.
pub(crate) fn status_at(socket: &Path) -> Result<(Status, Option<u32>)> {
    let mut stream =
        UnixStream::connect(socket).with_context(|| format!("cannot connect to {}", socket.display()))?;
    let peer = orrery_sys::peer::credentials(stream.as_fd()).ok();
    writeln!(stream, "status").context("cannot send a question to the pair")?;
    let mut answer = String::new();
    BufReader::new(stream)
        .take(LONGEST)
        .read_line(&mut answer)
        .context("cannot read the answer of the pair")?;
    let mut event: Value = serde_json::from_str(&answer).context("cannot read the answer of the pair")?;
    let status = serde_json::from_value(event["status"].take())
        .context("cannot read the status of the pair: it is of another version of Orrery")?;
    Ok((status, peer.and_then(|peer| u32::try_from(peer.pid).ok()).filter(|pid| *pid > 0)))
}

/// Says a line to the pair, and gives what it answers.
pub(super) fn ask(directory: &Path, line: &str) -> Result<String> {
    let socket = directory.join(SOCKET);
    let mut stream =
        UnixStream::connect(&socket).with_context(|| format!("no pair runs in {}", directory.display()))?;
    writeln!(stream, "{line}")?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).context("the pair has ended")?;
    let event: Value = serde_json::from_str(&answer)?;
    let text = event["text"].as_str().unwrap_or_default().to_owned();
    if event["event"] == "failed" {
        bail!("{text}");
    }
    Ok(text)
}

/// Says a line to the pair and shows what it answers, until it has no more to say.
pub(super) fn say(target: &Target, line: &str) -> Result<()> {
    let socket = target.directory.join(SOCKET);
    let mut stream = UnixStream::connect(&socket)
        .with_context(|| format!("no pair runs in {}", target.directory.display()))?;
    writeln!(stream, "{line}")?;
    let mut failed = None;
    let mut out = std::io::stdout().lock();
    for event in BufReader::new(stream).lines() {
        let event = event.context("the pair has ended")?;
        let parsed: Value = serde_json::from_str(&event)?;
        let text = parsed["text"].as_str().unwrap_or_default();
        if target.json {
            writeln!(out, "{event}")?;
        } else {
            writeln!(out, "{text}")?;
        }
        failed = (parsed["event"] == "failed").then(|| text.to_owned());
    }
    match failed {
        Some(why) => bail!("{why}"),
        None => Ok(()),
    }
}
