//! The pair: an active machine that runs a service, a backup that can see its memory, and what happens when the
//! active's kernel dies.
//!
//! 1. **Detect.** A kernel that panics says so through its pvpanic device, and QEMU pauses the machine. One that falls
//!    silent is given up when no heartbeat has come from one of its processors for a second.
//! 2. **Fence.** The active is stopped before anything is read, so that a machine that was given up wrongly does no harm:
//!    it never runs again.
//! 3. **Rebuild.** The backup reads the dead memory, writes images of the service's processes, and criu makes processes
//!    of them.
//! 4. **Renew.** The survivor is the active now. A new backup is started that sees the survivor's memory.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use crate::control::{Control, Said, Step};
use crate::error::{Error, Result};
use crate::guest::{Service, write_image};
use crate::kernel::KernelFiles;
use crate::machine::{Machine, MachineConfig};
use crate::net::{MAC, Network};
use crate::qmp::Qmp;

/// How long a guest may take to boot on a machine with other things to do.
const BOOT: Duration = Duration::from_secs(120);
/// How long a processor may be silent.
const SILENCE: Duration = Duration::from_secs(1);
/// How long a rescue may take.
const RESCUE: Duration = Duration::from_secs(60);

/// What a pair is made of.
#[derive(Clone, Debug)]
pub struct PairConfig {
    /// Where its files lie: memory, consoles, sockets.
    pub folder: PathBuf,
    /// Where the kernel is kept.
    pub cache: PathBuf,
    /// What runs in it.
    pub service: Service,
    /// Memory of each machine in MiB, a power of two.
    pub memory_mib: u64,
    /// Processors of each machine.
    pub cpus: u32,
    /// The name of the network to make, which takes root; without one the service has none.
    pub network: Option<String>,
}

/// Why a failover was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// The kernel said that it panicked.
    Panic,
    /// A processor fell silent.
    Silence,
    /// Someone asked for it.
    Request,
}

/// What a failover did.
#[derive(Clone, Debug, Serialize)]
pub struct Failover {
    /// Why it was begun.
    pub cause: Cause,
    /// What took how long, in order: fence, then what the backup did.
    pub steps: Vec<Step>,
    /// From the failure's notice to the service's life, in seconds.
    pub seconds: f64,
    /// What was carried over.
    pub summary: Value,
}

/// A machine with its monitor and its program.
struct Member {
    machine: Machine,
    qmp: Qmp,
    control: Control,
    /// Its port of the network.
    port: String,
}

/// A running pair. Dropped, both machines are killed and their memory is gone.
pub struct Pair {
    config: PairConfig,
    kernel: KernelFiles,
    image: PathBuf,
    // Machines go before the network that they are in.
    active: Member,
    backup: Option<Member>,
    network: Option<Network>,
    pid: i32,
    generation: u32,
}

impl Pair {
    /// Starts both machines and arms the backup.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] where something is not installed, [`Error::Timeout`], [`Error::Guest`] where a guest said why.
    pub fn up(config: PairConfig) -> Result<Self> {
        let kernel = KernelFiles::obtain(&config.cache)?;
        std::fs::create_dir_all(&config.folder).map_err(crate::error::file("create", &config.folder))?;
        let image = config.folder.join("image");
        write_image(&kernel, &config.service, &image)?;
        let network = config.network.as_deref().map(Network::create).transpose()?;
        let within = network.as_ref();
        let active = start(&config, &kernel, &image, within, 0, None)?;
        if let Some(network) = within {
            network.attach(&active.port)?;
        }
        let backup = start(&config, &kernel, &image, within, 1, Some(&active.machine))?;
        let mut pair =
            Self { config, kernel, image, active, backup: Some(backup), network, pid: 0, generation: 1 };
        let Said::Ready { pid } = pair.active.control.expect("the service to run", BOOT)? else {
            return Err(confused(&pair.active.machine));
        };
        pair.pid = pid;
        pair.arm()?;
        Ok(pair)
    }

    /// Lets the backup learn the active's kernel, and gives how long that took, in seconds.
    fn arm(&mut self) -> Result<f64> {
        let Some(backup) = &mut self.backup else { return Ok(0.0) };
        let Said::Waiting = backup.control.expect("the backup to be up", BOOT)? else {
            return Err(confused(&backup.machine));
        };
        backup.control.ask(&json!({"do": "arm"}))?;
        match backup.control.expect("the backup to know the active's kernel", BOOT)? {
            Said::Armed { seconds, .. } => Ok(seconds),
            _ => Err(confused(&backup.machine)),
        }
    }

    /// Runs a program in the guest that has the service.
    ///
    /// # Errors
    ///
    /// As [`Control::run`].
    pub fn run(&mut self, argv: &[&str]) -> Result<String> {
        self.active.control.run(argv)
    }

    /// The machine that has the service.
    #[must_use]
    pub fn active(&self) -> &Machine {
        &self.active.machine
    }

    /// The machine that stands by.
    #[must_use]
    pub fn backup(&self) -> Option<&Machine> {
        self.backup.as_ref().map(|backup| &backup.machine)
    }

    /// The network that the service is reached through.
    #[must_use]
    pub fn network(&self) -> Option<&Network> {
        self.network.as_ref()
    }

    /// The service's number in its guest.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Lets the active's kernel die.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] where it cannot be asked to.
    pub fn crash(&mut self, kind: &str) -> Result<()> {
        self.active.control.ask(&json!({"do": "crash", "kind": kind}))
    }

    /// Waits until the active fails, at most `patience`.
    ///
    /// # Errors
    ///
    /// [`Error::Qmp`] where QEMU itself is gone: then its memory is, too.
    pub fn watch(&mut self, patience: Duration) -> Result<Option<Cause>> {
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            if let Some(event) = self.active.qmp.event(Duration::from_millis(20))?
                && event.name == "GUEST_PANICKED"
            {
                return Ok(Some(Cause::Panic));
            }
            if self.active.control.silence().is_some_and(|silence| silence > SILENCE) {
                return Ok(Some(Cause::Silence));
            }
        }
        Ok(None)
    }

    /// Moves the service to the backup, which becomes the active. The old active never runs again.
    ///
    /// # Errors
    ///
    /// What the backup said; the dead machine is then kept, stopped, and its memory with it.
    pub fn fail_over(&mut self, cause: Cause) -> Result<Failover> {
        let start = Instant::now();
        self.active.qmp.execute("stop", &json!({}))?;
        if let Some(network) = &self.network {
            network.detach(&self.active.port)?;
        }
        let fence = Step { name: "fence".to_owned(), seconds: start.elapsed().as_secs_f64() };
        let Some(mut backup) = self.backup.take() else {
            return Err(Error::Guest {
                machine: self.active.machine.name().to_owned(),
                why: "it has no backup".to_owned(),
            });
        };
        let told = backup
            .control
            .ask(&json!({"do": "failover", "pid": self.pid}))
            .and_then(|()| backup.control.expect("the service to live again", RESCUE));
        let (pid, steps, summary) = match told {
            Ok(Said::Survived { pid, steps, summary }) => (pid, steps, summary),
            other => {
                // The memory was only read: the backup may try again.
                let error = other.err().unwrap_or_else(|| confused(&backup.machine));
                self.backup = Some(backup);
                return Err(error);
            }
        };
        if let Some(network) = &self.network {
            network.attach(&backup.port)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        let mut dead = std::mem::replace(&mut self.active, backup);
        dead.machine.kill();
        self.pid = pid;
        let steps = std::iter::once(fence).chain(steps).collect();
        Ok(Failover { cause, steps, seconds, summary })
    }

    /// Starts a new backup for the survivor of a failover, and gives how long that took, in seconds.
    ///
    /// # Errors
    ///
    /// As [`up`](Self::up).
    pub fn renew(&mut self) -> Result<f64> {
        let begin = Instant::now();
        self.generation += 1;
        let (network, peer) = (self.network.as_ref(), Some(&self.active.machine));
        let backup = start(&self.config, &self.kernel, &self.image, network, self.generation, peer)?;
        self.backup = Some(backup);
        self.arm()?;
        Ok(begin.elapsed().as_secs_f64())
    }
}

fn confused(machine: &Machine) -> Error {
    Error::Guest {
        machine: machine.name().to_owned(),
        why: "it said something else than was asked".to_owned(),
    }
}

fn start(
    config: &PairConfig,
    kernel: &KernelFiles,
    image: &Path,
    network: Option<&Network>,
    generation: u32,
    peer: Option<&Machine>,
) -> Result<Member> {
    let role = if peer.is_some() { "backup" } else { "active" };
    let port = format!("tap{generation}");
    let mut append = format!("orrery.role={role}");
    let mut extra = Vec::new();
    if let Some(network) = network {
        network.add_port(&port)?;
        append.push_str(&format!(" orrery.address={}/{}", Network::SERVICE, Network::PREFIX));
        let back = format!("tap,id=net,ifname={port},script=no,downscript=no");
        extra = ["-netdev", &back, "-device", &format!("virtio-net-pci,netdev=net,mac={MAC}")]
            .map(str::to_owned)
            .to_vec();
    }
    let machine = MachineConfig {
        name: format!("guest{generation}"),
        memory_mib: config.memory_mib,
        cpus: config.cpus,
        append,
        initramfs: image.to_owned(),
        peer: peer.map(|peer| (peer.file("ram"), config.memory_mib)),
        extra,
    };
    let machine = Machine::start_within(&machine, kernel, &config.folder, network)?;
    let qmp = machine.qmp()?;
    let control = Control::connect(machine.name(), &machine.file("control"))?;
    Ok(Member { machine, qmp, control, port })
}
