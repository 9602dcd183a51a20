//! A machine of the pair with what the host holds of it: its monitor, its program, its port, its heartbeats.

use std::path::Path;
use std::time::Duration;

use crate::control::Control;
use crate::disk::Disk;
use crate::error::Result;
use crate::kernel::KernelFiles;
use crate::machine::{Machine, MachineConfig};
use crate::net::Network;
use crate::pair::PairConfig;
use crate::pulse::Pulse;
use crate::qmp::Qmp;

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
    /// Whether the service has come onto the network in it.
    pub(crate) online: bool,
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
        Ok(Self { machine, qmp, control, port, has_disk, wants_disk: false, pulse: None, online: false })
    }

    /// The longest silence of one of its processors; nothing before it is known where they beat.
    pub(crate) fn silence(&mut self) -> Result<Option<Duration>> {
        if self.pulse.is_none()
            && let Some((physical, cpus)) = self.control.beats()
        {
            let (name, memory) = (self.machine.name(), self.machine.file("ram"));
            self.pulse = Some(Pulse::find(name, &memory, physical, cpus)?);
        }
        let Some(pulse) = &mut self.pulse else { return Ok(None) };
        pulse.silence().map(|(silence, _)| Some(silence))
    }
}
