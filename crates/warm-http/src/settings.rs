//! What the command line says, checked and completed from the surroundings.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result};
use orrery_warm::client::Client;
use orrery_warm_http::command::Arguments;
use orrery_warm_http::paths::Scripts;
use orrery_warm_http::variables::INHERITED;

/// The settings of a server.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) client: Client,
    pub(crate) scripts: Scripts,
    pub(crate) health: String,
    /// Variables of every script.
    pub(crate) environment: Vec<(OsString, OsString)>,
    pub(crate) umask: u32,
    pub(crate) authorization: bool,
    pub(crate) requests: usize,
    pub(crate) connections: usize,
    pub(crate) head: usize,
    pub(crate) body: u64,
    pub(crate) answer_head: usize,
    pub(crate) head_time: Duration,
    pub(crate) body_time: Duration,
    pub(crate) send_time: Duration,
    pub(crate) reply_time: Duration,
    pub(crate) drain: Duration,
    pub(crate) finish: Duration,
}

impl Settings {
    /// Call it while the process has one thread.
    pub(crate) fn new(arguments: &Arguments) -> Result<Self> {
        let socket = arguments.socket.clone().or_else(default_socket);
        let socket =
            socket.context("no socket: pass --socket or set ORRERY_WARM (XDG_RUNTIME_DIR is unset)")?;
        let scripts = match (&arguments.script, &arguments.directory) {
            (Some(script), _) => Scripts::one(script)
                .with_context(|| format!("cannot open the script {}", script.display()))?,
            (None, directory) => {
                let directory = directory.as_ref().context("no scripts: pass --script or --directory")?;
                Scripts::below(directory)
                    .with_context(|| format!("cannot open the directory {}", directory.display()))?
            }
        };
        let mask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
        rustix::process::umask(mask);
        Ok(Self {
            client: Client::new(socket),
            scripts,
            health: arguments.health.clone(),
            environment: environment(&arguments.env),
            umask: mask.bits(),
            authorization: arguments.authorization,
            requests: usize::try_from(arguments.requests)?,
            connections: usize::try_from(arguments.connections)?,
            head: arguments.head,
            body: arguments.body,
            answer_head: arguments.answer_head,
            head_time: arguments.head_time,
            body_time: arguments.body_time,
            send_time: arguments.send_time,
            reply_time: arguments.reply_time,
            drain: arguments.drain,
            finish: arguments.finish,
        })
    }
}

/// As the other commands of `orrery warm` have it.
fn default_socket() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("ORRERY_WARM").or_else(|| Some(variable("XDG_RUNTIME_DIR")?.join("orrery-warm.socket")))
}

/// The variables that every script gets: some of this process', and those that `--env` names.
fn environment(named: &[OsString]) -> Vec<(OsString, OsString)> {
    let own = |name: &OsStr| Some((name.to_owned(), std::env::var_os(name)?));
    let inherited = INHERITED.iter().filter_map(|name| own(OsStr::new(name)));
    let named = named.iter().filter_map(|word| {
        let bytes = word.as_bytes();
        match bytes.iter().position(|byte| *byte == b'=') {
            Some(equals) => Some((
                OsStr::from_bytes(&bytes[..equals]).to_owned(),
                OsStr::from_bytes(&bytes[equals + 1..]).to_owned(),
            )),
            None => own(word),
        }
    });
    let named: Vec<_> = named.collect();
    let is_named = |name: &OsString| named.iter().any(|(other, _)| other == name);
    let mut all: Vec<_> = inherited.filter(|(name, _)| !is_named(name)).collect();
    all.extend(named);
    all
}
