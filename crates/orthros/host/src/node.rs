//! A machine of the pair with what the host holds of it: its monitor, its program, its port, its heartbeats.

use std::path::Path;
use std::time::{Duration, Instant};

use orrery_orthros_wire::{Report, Request};
use serde_json::json;

use crate::command_line::MachineConfig;
use crate::config::PairConfig;
use crate::control::Control;
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::heartbeat::Heartbeats;
use crate::kernel::KernelFiles;
use crate::machine::Machine;
use crate::net::Network;
use crate::qmp::Qmp;

/// How long to listen for an answer before looking whether anyone is there to give it.
const LISTEN: Duration = Duration::from_millis(20);
/// How often a machine that stands by is asked whether it is there.
const PING_INTERVAL: Duration = Duration::from_secs(2);
/// How long its answer may take. On a machine with other things to do that may be seconds; if it was there after all, another
/// backup in its place does no harm.
const PING_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a backup that lives may do nothing in the middle of a rescue. A disk of a busy host may let it wait for seconds.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// What a machine is there for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodeState {
    /// It has the service.
    Serving,
    /// It is to be a backup, and not that far yet.
    Booting,
    /// It is asked now and then whether it is there.
    Standby,
    /// It rebuilds the service, and hears nothing meanwhile.
    Restoring,
}

/// What both machines have in common.
pub(crate) struct Shared<'p> {
    pub(crate) kernel: &'p KernelFiles,
    pub(crate) image: &'p Path,
    pub(crate) network: Option<&'p Network>,
    pub(crate) disk: Option<&'p Disk>,
}

/// A machine with its monitor and its program.
pub(crate) struct Node {
    pub(crate) machine: Machine,
    pub(crate) qmp: Qmp,
    pub(crate) control: Control,
    /// Its port of the network.
    pub(crate) port: String,
    /// Whether it has the service's disk.
    pub(crate) has_disk: bool,
    /// Whether the service's disk is to be plugged into it.
    pub(crate) needs_disk: bool,
    /// Its heartbeats, when they have been found.
    pub(crate) heartbeats: Option<Heartbeats>,
    /// Whether it has begun to rebuild the service: what it has made by then is in the way of another try.
    pub(crate) restore_started: bool,
    /// Whether the service has come onto the network in it.
    pub(crate) online: bool,
    pub(crate) state: NodeState,
    /// The signs of life that it gives while it does not have the service, when they have been found.
    standby: Option<Heartbeats>,
    /// Why it is of no use any more, once that was noticed.
    failure_reason: Option<String>,
}

impl Node {
    /// Starts the machine of a generation: with the service and its disk, or, where it sees a peer's memory, as its backup.
    pub(crate) fn start(
        config: &PairConfig,
        shared: &Shared<'_>,
        generation: u32,
        peer: Option<&Machine>,
    ) -> Result<Self> {
        let role = if peer.is_some() { "backup" } else { "active" };
        let mut append = format!("orrery.role={role}");
        let mut extra = Vec::new();
        let port = shared.network.map(|network| network.port(generation)).unwrap_or_default();
        if let Some(network) = shared.network {
            append.push_str(&network.append());
            extra.extend(network.arguments(&port));
        }
        let has_disk = shared.disk.is_some() && peer.is_none();
        if let Some(disk) = shared.disk {
            append.push_str(&format!(" orrery.disk={}", disk.mount));
            extra.extend(Disk::port());
            if has_disk {
                extra.extend(disk.arguments());
            }
        }
        if !config.append.is_empty() {
            append.push_str(&format!(" {}", config.append));
        }
        let machine = MachineConfig {
            name: format!("guest{generation}"),
            memory_mib: config.memory_mib,
            cpus: config.cpus,
            append,
            initramfs: shared.image.to_owned(),
            peer: peer.map(|peer| (peer.file("ram"), config.memory_mib)),
            extra,
        };
        let mut machine = Machine::start_within(&machine, shared.kernel, &config.directory, shared.network)?;
        let qmp = machine.qmp()?;
        // What answers has made its devices.
        shared.network.map_or(Ok(()), |network| network.switch_on(&port))?;
        let control = Control::connect(machine.name(), &machine.file("control"))?;
        Ok(Self {
            machine,
            qmp,
            control,
            port,
            has_disk,
            needs_disk: false,
            heartbeats: None,
            restore_started: false,
            online: false,
            state: if peer.is_some() { NodeState::Booting } else { NodeState::Serving },
            standby: None,
            failure_reason: None,
        })
    }

    /// Returns why it is of no use any more, if that shows within `patience`: its QEMU has ended, or its kernel has,
    /// or it does not answer. A kernel that panics leaves its QEMU standing still, so that the process alone tells
    /// nothing.
    pub(crate) fn failure_reason(&mut self, patience: Duration) -> Option<&str> {
        let deadline = Instant::now() + patience;
        while self.failure_reason.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.qmp.event(left) {
                Ok(Some(event)) if event.name == "GUEST_PANICKED" => {
                    self.failure_reason = Some("its kernel has panicked".to_owned());
                }
                Ok(Some(event)) if event.name == "SHUTDOWN" => {
                    self.failure_reason = Some("it has shut down".to_owned());
                }
                Ok(Some(event)) if event.is_host_disk_full() => {
                    self.failure_reason =
                        Some("this host has no room for what it writes to its disk; make some".to_owned());
                }
                Ok(Some(_)) => {}
                Ok(None) => {
                    self.failure_reason = self.liveness_failure();
                    break;
                }
                Err(Error::Qmp { why, .. }) => self.failure_reason = Some(why),
                Err(error) => self.failure_reason = Some(error.to_string()),
            }
        }
        self.failure_reason.as_deref()
    }

    /// That it does not answer, gives no sign of life, or gets no further, where that is so; asks again where it stands by.
    fn liveness_failure(&mut self) -> Option<String> {
        let (unanswered, answered) = self.control.ping_state();
        if let Some(unanswered) = unanswered
            && unanswered > PING_TIMEOUT
        {
            return Some(format!("it has not answered for {} s", PING_TIMEOUT.as_secs()));
        }
        // Memory that this host cannot read at the moment says nothing of the machine, which is asked besides.
        if let Ok(Some(why)) = self.heartbeat_failure() {
            return Some(why);
        }
        if self.state == NodeState::Standby
            && unanswered.is_none()
            && answered.is_none_or(|ago| ago > PING_INTERVAL)
        {
            return self.control.ping().err().map(|error| error.to_string());
        }
        None
    }

    /// That a backup gives no sign of life, or gets no further where it has something to do.
    fn heartbeat_failure(&mut self) -> Result<Option<String>> {
        if self.state == NodeState::Serving {
            return Ok(None);
        }
        if self.standby.is_none()
            && let Some((physical, cpus)) = self.control.standby_heartbeats()
        {
            self.standby = Some(self.open_heartbeats(physical, cpus)?);
        }
        let Some(standby) = &mut self.standby else { return Ok(None) };
        let (silence, cpu) = standby.silence()?;
        if silence > PING_TIMEOUT {
            return Ok(Some(format!("its processor {cpu} has been silent for {} s", PING_TIMEOUT.as_secs())));
        }
        let stuck = self.state == NodeState::Restoring && standby.stall() > STALL_TIMEOUT;
        Ok(stuck.then(|| {
            format!("its kernel lives, but it has got no further for {} s", STALL_TIMEOUT.as_secs())
        }))
    }

    fn open_heartbeats(&self, physical: u64, cpus: usize) -> Result<Heartbeats> {
        Heartbeats::find(self.machine.name(), &self.machine.file("ram"), physical, cpus)
    }

    /// Asks its program for what takes long, and stops asking whether it is there: it answers once more, when it begins.
    pub(crate) fn start_restoring(&mut self, request: &Request) -> Result<()> {
        self.state = NodeState::Restoring;
        if let Some(standby) = &mut self.standby {
            standby.reset_stall();
        }
        self.control.ping()?;
        self.control.send(request)
    }

    /// Waits for its program to say something, as [`Control::expect`] does, and no longer than there is someone to say it.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] with what the program said, or with what became of the machine; [`Error::Timeout`].
    pub(crate) fn expect(&mut self, what: &str, patience: Duration) -> Result<Report> {
        let deadline = Instant::now() + patience;
        let mut gone: Option<String> = None;
        loop {
            let machine = self.machine.name().to_owned();
            match self.control.receive(LISTEN) {
                Some(Report::Failed { error }) => {
                    let exit = self.control.service_exit().map(|exit| format!("; the service {exit}"));
                    return Err(Error::Guest { machine, why: error + &exit.unwrap_or_default() });
                }
                Some(said) => return Ok(said),
                None => {}
            }
            // Only now: what it said before it fell was still to be heard.
            if let Some(why) = gone {
                return Err(Error::Guest { machine, why: format!("{why}, while {what} was waited for") });
            }
            if Instant::now() > deadline {
                let (seconds, what) = (patience.as_secs(), what.to_owned());
                return Err(Error::Timeout { machine, seconds, what, hint: String::new() });
            }
            gone = self.failure_reason(Duration::ZERO).map(str::to_owned);
        }
    }

    /// Lets its kernel die.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] where it cannot be asked to, or its kernel offers no such way.
    pub(crate) fn crash(&mut self, fault: Fault) -> Result<()> {
        if fault == Fault::Nmi {
            // The guest has to know before that this is a reason to panic.
            self.control.run(&["sh", "-c", "echo 1 > /proc/sys/kernel/unknown_nmi_panic"])?;
            return self.qmp.execute("inject-nmi", &json!({})).map(drop);
        }
        let trigger = fault.prepare(self.machine.name(), &self.machine.file("ram"))?;
        self.control.send(&Request::Crash { kind: fault.name().to_owned(), trigger })
    }

    /// The longest silence of one of its processors; nothing before it is known where they beat.
    pub(crate) fn silence(&mut self) -> Result<Option<Duration>> {
        if self.heartbeats.is_none()
            && let Some((physical, cpus)) = self.control.heartbeats()
        {
            self.heartbeats = Some(self.open_heartbeats(physical, cpus)?);
        }
        let Some(heartbeats) = &mut self.heartbeats else { return Ok(None) };
        heartbeats.silence().map(|(silence, _)| Some(silence))
    }
}
