//! A machine of the pair with what the host holds of it: its monitor, its program, its port, its heartbeats.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::control::{Control, Said};
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::kernel::KernelFiles;
use crate::machine::{Machine, MachineConfig};
use crate::net::Network;
use crate::pair::PairConfig;
use crate::pulse::Pulse;
use crate::qmp::Qmp;

/// How long to listen for an answer before looking whether anyone is there to give it.
const LISTEN: Duration = Duration::from_millis(20);
/// How often a machine that stands by is asked whether it is there.
const KNOCK: Duration = Duration::from_secs(2);
/// How long its answer may take. On a machine with other things to do that may be seconds; if it was there after all, another
/// backup in its place does no harm.
const DEAF: Duration = Duration::from_secs(15);
/// How long a backup that lives may do nothing in the middle of a rescue. A disk of a busy host may let it wait for seconds.
const STUCK: Duration = Duration::from_secs(60);

/// What a machine is there for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Duty {
    /// It has the service.
    Serves,
    /// It is to be a backup, and not that far yet.
    Prepares,
    /// It is asked now and then whether it is there.
    StandsBy,
    /// It rebuilds the service, and hears nothing meanwhile.
    Rescues,
}

/// What both machines have in common.
pub(crate) struct Shared<'p> {
    pub(crate) kernel: &'p KernelFiles,
    pub(crate) image: &'p Path,
    pub(crate) network: Option<&'p Network>,
    pub(crate) disk: Option<&'p Disk>,
}

/// A machine with its monitor and its program.
pub(crate) struct Member {
    pub(crate) machine: Machine,
    pub(crate) qmp: Qmp,
    pub(crate) control: Control,
    /// Its port of the network.
    pub(crate) port: String,
    /// Whether it has the service's disk.
    pub(crate) has_disk: bool,
    /// Whether the service's disk is to be plugged into it.
    pub(crate) wants_disk: bool,
    /// Its heartbeats, when they have been found.
    pub(crate) pulse: Option<Pulse>,
    /// Whether it has begun to rebuild the service: what it has made by then is in the way of another try.
    pub(crate) begun: bool,
    /// Whether the service has come onto the network in it.
    pub(crate) online: bool,
    pub(crate) duty: Duty,
    /// The signs of life that it gives while it does not have the service, when they have been found.
    standby: Option<Pulse>,
    /// Why it is of no use any more, once that was noticed.
    fallen: Option<String>,
}

impl Member {
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
        let mut machine = Machine::start_within(&machine, shared.kernel, &config.folder, shared.network)?;
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
            wants_disk: false,
            pulse: None,
            begun: false,
            online: false,
            duty: if peer.is_some() { Duty::Prepares } else { Duty::Serves },
            standby: None,
            fallen: None,
        })
    }

    /// Why it is of no use any more, if that shows within `patience`: its QEMU has ended, or its kernel has, or it does not answer. A
    /// kernel that panics leaves its QEMU standing still, so that the process alone tells nothing.
    pub(crate) fn fallen(&mut self, patience: Duration) -> Option<&str> {
        let deadline = Instant::now() + patience;
        while self.fallen.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.qmp.event(left) {
                Ok(Some(event)) if event.name == "GUEST_PANICKED" => {
                    self.fallen = Some("its kernel has panicked".to_owned());
                }
                Ok(Some(event)) if event.name == "SHUTDOWN" => {
                    self.fallen = Some("it has shut down".to_owned());
                }
                Ok(Some(event)) if event.is_want_of_room() => {
                    self.fallen =
                        Some("this host has no room for what it writes to its disk; make some".to_owned());
                }
                Ok(Some(_)) => {}
                Ok(None) => {
                    self.fallen = self.deafness();
                    break;
                }
                Err(Error::Qmp { why, .. }) => self.fallen = Some(why),
                Err(error) => self.fallen = Some(error.to_string()),
            }
        }
        self.fallen.as_deref()
    }

    /// That it does not answer, gives no sign of life, or gets no further, where that is so; asks again where it stands by.
    fn deafness(&mut self) -> Option<String> {
        let (unanswered, answered) = self.control.hearing();
        if let Some(unanswered) = unanswered
            && unanswered > DEAF
        {
            return Some(format!("it has not answered for {} s", DEAF.as_secs()));
        }
        if let Some(why) = self.lifelessness().unwrap_or_else(|error| Some(error.to_string())) {
            return Some(why);
        }
        if self.duty == Duty::StandsBy && unanswered.is_none() && answered.is_none_or(|ago| ago > KNOCK) {
            return self.control.knock().err().map(|error| error.to_string());
        }
        None
    }

    /// That a backup gives no sign of life, or gets no further where it has something to do.
    fn lifelessness(&mut self) -> Result<Option<String>> {
        if self.duty == Duty::Serves {
            return Ok(None);
        }
        if self.standby.is_none()
            && let Some((physical, cpus)) = self.control.standby()
        {
            self.standby = Some(self.pulse_at(physical, cpus)?);
        }
        let Some(standby) = &mut self.standby else { return Ok(None) };
        let (silence, cpu) = standby.silence()?;
        if silence > DEAF {
            return Ok(Some(format!("its processor {cpu} has been silent for {} s", DEAF.as_secs())));
        }
        let stuck = self.duty == Duty::Rescues && standby.idleness() > STUCK;
        Ok(stuck.then(|| format!("its kernel lives, but it has got no further for {} s", STUCK.as_secs())))
    }

    fn pulse_at(&self, physical: u64, cpus: usize) -> Result<Pulse> {
        Pulse::find(self.machine.name(), &self.machine.file("ram"), physical, cpus)
    }

    /// Asks its program for what takes long, and stops asking whether it is there: it answers once more, when it begins.
    pub(crate) fn put_to_work(&mut self, what: &serde_json::Value) -> Result<()> {
        self.duty = Duty::Rescues;
        if let Some(standby) = &mut self.standby {
            standby.begin();
        }
        self.control.knock()?;
        self.control.ask(what)
    }

    /// Waits for its program to say something, as [`Control::expect`] does, and no longer than there is someone to say it.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] with what the program said, or with what became of the machine; [`Error::Timeout`].
    pub(crate) fn expect(&mut self, what: &str, patience: Duration) -> Result<Said> {
        let deadline = Instant::now() + patience;
        let mut gone: Option<String> = None;
        loop {
            let machine = self.machine.name().to_owned();
            match self.control.listen(LISTEN) {
                Some(Said::Failed { why }) => return Err(Error::Guest { machine, why }),
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
            gone = self.fallen(Duration::ZERO).map(str::to_owned);
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
        let bait = fault.prepare(self.machine.name(), &self.machine.file("ram"))?;
        self.control.ask(&json!({"do": "crash", "kind": fault.name(), "bait": bait}))
    }

    /// The longest silence of one of its processors; nothing before it is known where they beat.
    pub(crate) fn silence(&mut self) -> Result<Option<Duration>> {
        if self.pulse.is_none()
            && let Some((physical, cpus)) = self.control.beats()
        {
            self.pulse = Some(self.pulse_at(physical, cpus)?);
        }
        let Some(pulse) = &mut self.pulse else { return Ok(None) };
        pulse.silence().map(|(silence, _)| Some(silence))
    }
}
