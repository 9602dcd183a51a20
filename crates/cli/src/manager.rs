//! `orrery manager`, and how `orrery run` has programs join one.
//!
//! What serves is a program of its own, which this one executes: extensions bring a compiler with them.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use orrery_hijack::policy::Manager;
use orrery_manager::Package;
use orrery_manager::client::SOCKET_VARIABLE;
pub(crate) use orrery_manager::command::Arguments;
use orrery_manager::command::{cpu_share, execute_server};
use orrery_manager::join::{Joined, Joining, Kept, join, start_keeper};
use orrery_manager::protocol::{Reply, Request};

/// The class of shares of packets.
const PACKETS: &str = "net.share";

/// How a program is to be served.
#[derive(clap::Args)]
#[group(id = "service")]
pub(crate) struct Options {
    /// Guarantee the program, together with all that it starts, CPU time in each period, such as 40ms/400ms; starts a manager if none
    /// runs
    #[arg(long, value_name = "TARGET/PERIOD", value_parser = share)]
    cpu: Option<Share>,

    /// Have this part of the program's UDP packets never dropped early in an overload, and before others' packets with lower shares;
    /// starts a manager if none runs
    #[arg(long, value_name = "SHARE")]
    net: Option<String>,

    /// Load the extension of this manifest into the manager, with the rights of the program's user to this program; starts a manager
    /// if none runs
    #[arg(long, value_name = "MANIFEST")]
    extension: Vec<PathBuf>,

    /// Join the manager at this socket, and no other
    #[arg(long, value_name = "SOCKET")]
    manager: Option<PathBuf>,

    /// Have the manager receive the calls that the policy logs, as events for its handlers, instead of writing them. What its queue has
    /// no room for is dropped and counted
    #[arg(long, requires = "policy", conflicts_with_all = ["log", "enforce"])]
    events: bool,
}

/// The value of `--cpu`.
#[derive(Clone)]
struct Share(orrery_manager::protocol::Values);

fn share(text: &str) -> Result<Share, String> {
    cpu_share(text).map(Share)
}

/// Runs the command.
///
/// # Errors
/// A message for the user.
pub(crate) fn run(arguments: Arguments) -> anyhow::Result<()> {
    orrery_manager::command::run(arguments, |_checked| {
        let all = std::env::args_os().skip_while(|argument| argument != "manager").skip(1);
        execute_server(all)
    })
}

impl Options {
    /// Returns whether the manager receives the calls that the policy logs.
    pub(crate) fn receives_calls(&self) -> bool {
        self.events
    }

    /// Has a process join, which runs this program or is about to become it, if the options or the policy say so.
    ///
    /// # Errors
    /// There is no manager, or it refuses: the program is not run without what it was to have.
    pub(crate) fn join(
        &self,
        pid: i32,
        program: &Path,
        policy: Option<&Manager>,
        journal: Option<i32>,
    ) -> anyhow::Result<()> {
        let section = policy.cloned().unwrap_or_default();
        let mut values: orrery_manager::protocol::Values = section.attributes.into_iter().collect();
        match (&self.cpu, &section.cpu) {
            (Some(Share(share)), _) => values.extend(share.iter().cloned()),
            (None, Some(text)) => values.extend(cpu_share(text).map_err(anyhow::Error::msg)?),
            (None, None) => {}
        }
        let socket = self.manager.clone().or(section.socket);
        if let Some(share) = &self.net {
            values.retain(|(class, _)| class != PACKETS);
            values.push((PACKETS.to_owned(), share.clone()));
        }
        if values.is_empty() && socket.is_none() && journal.is_none() && self.extension.is_empty() {
            return Ok(());
        }
        let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
        let joining = Joining { socket, name, values, journal };
        let joined = join(&joining, pid)?;
        let reserves = joining.values.iter().any(|(class, _)| class == "cpu.target");
        if let Some(how) = consequence(joined.mechanism).filter(|_| reserves) {
            eprintln!("orrery: CPU time of process {pid} by {}: {how}", joined.mechanism.name());
        }
        if joining.values.iter().any(|(class, _)| class == PACKETS)
            && let Some(reason) = refused(&joined)
        {
            eprintln!("orrery: packets of process {pid} are delivered as ever: {reason}");
        }
        let load = |manifest: &PathBuf| {
            let package = Package::read(manifest)?;
            let number = package.load(&joined.client)?;
            Ok(Kept::new(package, number))
        };
        let extensions: Vec<Kept> = self.extension.iter().map(load).collect::<anyhow::Result<_>>()?;
        start_keeper(joined, &joining, pid, &extensions)
            .context("cannot start the process that stays with the tracee")?;
        if let Some(socket) = joining.socket.filter(|_| pid == std::process::id().cast_signed()) {
            let socket = std::path::absolute(&socket).context("cannot name the manager to the program")?;
            // SAFETY: this process, which becomes the program, has one thread.
            unsafe { std::env::set_var(SOCKET_VARIABLE, socket) };
        }
        Ok(())
    }
}

/// Returns why the manager cannot give the tracee its share of packets.
fn refused(joined: &Joined) -> Option<String> {
    let Ok(Reply::Status(status)) = joined.client.ask(&Request::Status) else { return None };
    status.packets.into_iter().find(|packets| packets.tracee == joined.tracee)?.refused
}

/// Returns what it means that there was no better way.
fn consequence(mechanism: orrery_manager::Mechanism) -> Option<&'static str> {
    use orrery_manager::Mechanism;
    match mechanism {
        Mechanism::Realtime => None,
        Mechanism::Group => Some(
            "a weight, which programs at real-time priority override; real-time priority requires CAP_SYS_NICE",
        ),
        Mechanism::Nice => Some(
            "a nice value, which is a weight, and no guarantee; real-time priority requires CAP_SYS_NICE",
        ),
        Mechanism::Measure => Some(
            "nothing is guaranteed, and what it misses is counted; real-time priority requires CAP_SYS_NICE or RLIMIT_RTPRIO",
        ),
    }
}
