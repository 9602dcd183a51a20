//! The pair: an active machine that runs a service, a backup that can see its memory, and what happens when the
//! active's kernel dies.
//!
//! 1. **Detect.** A kernel that panics says so through its pvpanic device, and QEMU pauses the machine. One that falls
//!    silent is given up when no heartbeat has come from one of its processors for a second.
//! 2. **Fence.** The active is paused and then killed before anything is read, so that a machine that was given up
//!    wrongly does no harm: it never runs again. Its memory is a file, which stays.
//! 3. **Rebuild.** The backup reads the dead memory and writes images of the service's processes, while the dead
//!    machine's disk is plugged into it; writes to the disk what the dead kernel had not; and criu makes processes of
//!    the images.
//! 4. **Renew.** The survivor is the active now. A new backup is started that sees the survivor's memory.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use orrery_orthros_wire::{Report, Request, ServiceExit, Step, Summary};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::config::PairConfig;
use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::fault::Fault;
use crate::image::write_image;
use crate::kernel::KernelFiles;
use crate::machine::Machine;
use crate::net::Network;
use crate::node::{Node, NodeState, Shared};
use crate::requirements;
use crate::status::{MemoryEstimate, Role, Status};

/// How long a guest may take to boot on a machine with other things to do.
const BOOT: Duration = Duration::from_secs(300);
/// How long a service may take to be ended.
const END: Duration = Duration::from_secs(20);
/// How long it takes to notice that a machine is gone that has just said its last.
const CLOSING: Duration = Duration::from_millis(100);
/// How long QEMU may take to pause the active, at least; a pair that bears a longer silence waits as long here.
const FENCE: Duration = Duration::from_secs(1);
/// How long a kernel may take to panic that was asked to.
const DYING: Duration = Duration::from_secs(20);
/// How soon a guest says that it cannot die.
const COMPLAINING: Duration = Duration::from_secs(1);
/// How long a backup may take to tell what it would take to rebuild a service.
const ESTIMATE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the rest of a service's memory may take to come.
const WHOLE: Duration = Duration::from_secs(180);
/// How long to wait for something to happen at a time.
const POLL: Duration = Duration::from_millis(20);
/// How often to look whether there is room again.
const ROOM: Duration = Duration::from_secs(1);
/// How soon it shows that there is none.
const REFUSED: Duration = Duration::from_millis(300);
/// How long a part of a rescue may take in any case; one that hangs or gets no further is found long before.
const RESCUE: Duration = Duration::from_secs(3600);
/// How long a machine with a silent processor goes on where what another one did cannot be read, and how often.
const MOMENT: Duration = Duration::from_millis(2);
const MOMENTS: u32 = 20;

/// Why a failover was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cause {
    /// The kernel said that it panicked.
    Panic,
    /// A processor fell silent.
    Silence,
    /// The virtual machine itself has ended: its QEMU was killed or crashed.
    Killed,
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
    pub summary: Summary,
}

/// Memory that came when the service lived again.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LazyPages {
    /// The number of pages.
    pub pages: u64,
    /// How long that took, in seconds.
    pub seconds: f64,
}

/// A running pair. Dropped, both machines are killed and their memory is gone.
pub struct Pair {
    config: PairConfig,
    kernel: KernelFiles,
    image: PathBuf,
    // Machines go before the network that they are in.
    active: Node,
    backup: Option<Node>,
    /// Which backups have died, and of what.
    lost: Vec<String>,
    network: Option<Network>,
    disk: Option<Disk>,
    /// What the active's processors held when it was paused, as QEMU prints it.
    registers: String,
    pid: i32,
    generation: u32,
    failovers: u32,
    /// How long a processor may be silent.
    patience: Duration,
    /// The last one that died, whose memory the active may still need.
    dead: Option<Machine>,
    /// Whether some of the service's memory still is there only.
    incomplete: bool,
    /// When the active last stood still because this host has no room for its disk's image, if it does.
    full: Option<Instant>,
}

impl Pair {
    /// Starts both machines and arms the backup.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] where something is not installed, [`Error::Rights`], [`Error::Room`], before anything is
    /// made; [`Error::Timeout`], [`Error::Guest`] where a guest said why.
    pub fn start(config: PairConfig) -> Result<Self> {
        requirements::check(&config)?;
        std::fs::create_dir_all(&config.directory)
            .map_err(crate::error::file("create", &config.directory))?;
        let disk = config.disk.as_ref().map(|disk| Disk::obtain(disk, &config.directory)).transpose()?;
        let kernel = KernelFiles::obtain(&config.cache)?;
        let image = config.directory.join("image");
        write_image(&kernel, &config.service, &image)?;
        requirements::check_image(&image, config.memory_mib)?;
        let network = config.network.as_ref().map(Network::obtain).transpose()?;
        let shared =
            Shared { kernel: &kernel, image: &image, network: network.as_ref(), disk: disk.as_ref() };
        let active = Node::start(&config, &shared, 0, None)?;
        if let Some(network) = &network {
            network.attach(&active.port)?;
        }
        let backup = Some(Node::start(&config, &shared, 1, Some(&active.machine))?);
        let patience = config.silence;
        let mut pair = Self {
            patience,
            config,
            kernel,
            image,
            active,
            backup,
            lost: Vec::new(),
            network,
            disk,
            registers: String::new(),
            pid: 0,
            generation: 1,
            failovers: 0,
            dead: None,
            incomplete: false,
            full: None,
        };
        pair.pid = pair.wait_for_service()?;
        pair.arm()?;
        Ok(pair)
    }

    /// Lets the backup learn the active's kernel, and gives how long that took, in seconds.
    fn arm(&mut self) -> Result<f64> {
        let Some(backup) = &mut self.backup else { return Ok(0.0) };
        let Report::BackupReady = backup.expect("the backup to be up", BOOT)? else {
            return Err(unexpected_report(&backup.machine));
        };
        backup.control.send(&Request::Arm)?;
        match backup.expect("the backup to know the active's kernel", BOOT)? {
            Report::Armed { seconds, .. } => {
                backup.state = NodeState::Standby;
                Ok(seconds)
            }
            _ => Err(unexpected_report(&backup.machine)),
        }
    }

    /// Runs a program in the guest that has the service.
    ///
    /// # Errors
    ///
    /// As [`Control::run`](crate::Control::run).
    pub fn run(&mut self, argv: &[&str]) -> Result<String> {
        self.active.control.run(argv)
    }

    /// The machine that has the service.
    #[must_use]
    pub fn active(&self) -> &Machine {
        &self.active.machine
    }

    /// Returns the machine that stands by.
    #[must_use]
    pub fn backup(&self) -> Option<&Machine> {
        self.backup.as_ref().map(|backup| &backup.machine)
    }

    /// Waits until the active has started the service, and returns the service's PID there.
    fn wait_for_service(&mut self) -> Result<i32> {
        match self.active.expect("the service to run", BOOT) {
            Ok(Report::Ready { pid }) => Ok(pid),
            Ok(_) => Err(unexpected_report(&self.active.machine)),
            Err(error) => match self.active.control.service_exit() {
                Some(exit) => {
                    let machine = self.active.machine.name().to_owned();
                    Err(Error::Guest { machine, why: format!("the service {exit} at once") })
                }
                None => Err(error),
            },
        }
    }

    /// Returns which machine is what.
    pub fn status(&mut self) -> Status {
        self.reap_backup();
        let role = |machine: &mut Machine| Role {
            name: machine.name().to_owned(),
            pid: machine.pid(),
            lives: machine.runs(),
        };
        Status {
            active: role(&mut self.active.machine),
            backup: self.backup.as_mut().map(|backup| role(&mut backup.machine)),
            service: self.pid,
            exit: self.active.control.service_exit(),
            failovers: self.failovers,
            lost: self.lost.clone(),
            full: self.full_disk().map(Path::to_owned),
            memory_estimate: self.estimate_memory(),
        }
    }

    /// Returns how the service's main process has exited, if it has. The machines are still there.
    pub fn service_exit(&mut self) -> Option<ServiceExit> {
        self.active.control.service_exit()
    }

    /// Returns what it would take to rebuild the service as it is now; nothing where no backup can tell.
    pub fn estimate_memory(&mut self) -> Option<MemoryEstimate> {
        if !self.backup_is_alive() {
            return None;
        }
        let backup = self.backup.as_mut()?;
        let (required_mib, available_mib) = backup.control.estimate_memory(self.pid, ESTIMATE_TIMEOUT)?;
        Some(MemoryEstimate { required_mib, available_mib })
    }

    /// Bears a processor's silence for this long, or again for as long as was configured.
    pub fn set_silence_limit(&mut self, silence: Option<Duration>) {
        self.patience = silence.unwrap_or(self.config.silence);
    }

    /// Returns whether the machine that stands by is there, and its kernel lives.
    pub fn backup_is_alive(&mut self) -> bool {
        self.reap_backup();
        self.backup.is_some()
    }

    /// Returns which backups have died, and of what, in order.
    #[must_use]
    pub fn lost_backups(&self) -> &[String] {
        &self.lost
    }

    /// Lets go of a backup that has died.
    fn reap_backup(&mut self) {
        let Some(backup) = &mut self.backup else { return };
        if let Some(why) = backup.failure_reason(Duration::ZERO).map(str::to_owned) {
            let machine = backup.machine.name().to_owned();
            self.discard_backup(&Error::Guest { machine, why });
        }
    }

    /// Ends the backup, of which there is no use any more, and notes why.
    fn discard_backup(&mut self, why: &Error) {
        // Its port of the network goes with its QEMU.
        self.backup = None;
        self.lost.push(why.to_string());
    }

    /// Returns whether the machine with the service is there; it may stand still.
    pub fn active_is_alive(&mut self) -> bool {
        self.active.machine.runs()
    }

    /// Leaves the active's memory as a file when the pair is gone, and tells where.
    ///
    /// # Errors
    ///
    /// As [`Machine::preserve_memory`].
    pub fn preserve_memory(&mut self) -> Result<PathBuf> {
        self.active.machine.preserve_memory()?;
        Ok(self.active.machine.file("ram"))
    }

    /// Returns how often the service has moved.
    #[must_use]
    pub fn failovers(&self) -> u32 {
        self.failovers
    }

    /// The network that the service is reached through.
    #[must_use]
    pub fn network(&self) -> Option<&Network> {
        self.network.as_ref()
    }

    /// Returns the service's number in its guest.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Lets the active's kernel die.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] where it cannot be asked to, or its kernel offers no such way.
    pub fn crash(&mut self, fault: Fault) -> Result<()> {
        self.active.crash(fault)
    }

    /// Lets the backup's kernel die, to see that it is missed. One that is to fall silent is missed
    /// [later](Self::backup_is_alive).
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] where there is none, or it cannot be asked to; [`Error::Timeout`] where it lives on.
    pub fn crash_backup(&mut self, fault: Fault) -> Result<()> {
        let Some(backup) = &mut self.backup else {
            let machine = self.active.machine.name().to_owned();
            let why = "no backup stands by it that could die; `status` tells what became of the last one";
            return Err(Error::Guest { machine, why: why.to_owned() });
        };
        backup.crash(fault)?;
        let patience = if fault.is_silent() { COMPLAINING } else { DYING };
        let fell = backup.failure_reason(patience).is_some();
        match backup.control.take_failure() {
            Some(failure) if !fell => Err(failure),
            None if !fell && !fault.is_silent() => Err(Error::Timeout {
                machine: backup.machine.name().to_owned(),
                seconds: DYING.as_secs(),
                what: "its kernel to panic".to_owned(),
                hint: String::new(),
            }),
            _ => Ok(()),
        }
    }

    /// Waits until the active fails, at most `patience`.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] where the guest says that it could not
    /// [`crash`](Self::crash) as it was asked to.
    pub fn watch(&mut self, patience: Duration) -> Result<Option<Cause>> {
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            if let Some(cause) = self.poll_events()? {
                return Ok(Some(cause));
            }
            if self.full.is_some() {
                break;
            }
            if self.active.silence()?.is_some_and(|silence| silence > self.patience) {
                return Ok(Some(Cause::Silence));
            }
            if let Some(failure) = self.active.control.take_failure() {
                return Err(failure);
            }
        }
        Ok(None)
    }

    /// Hears what QEMU tells of the active, and whether it has ended.
    fn poll_events(&mut self) -> Result<Option<Cause>> {
        let mut patience = POLL;
        loop {
            let event = match self.active.qmp.event(patience) {
                Ok(Some(event)) => event,
                Ok(None) => break,
                Err(_) => return Ok(Some(self.active_has_ended())),
            };
            if event.name == "GUEST_PANICKED" {
                return Ok(Some(Cause::Panic));
            }
            if event.is_host_disk_full() {
                self.full = Some(Instant::now());
            }
            patience = Duration::ZERO;
        }
        if self.full.is_some_and(|since| since.elapsed() > ROOM) {
            return self.retry_disk_writes();
        }
        Ok(None)
    }

    /// Ends an active whose monitor is gone: it can neither be paused nor asked for anything.
    fn active_has_ended(&mut self) -> Cause {
        self.active.machine.kill();
        Cause::Killed
    }

    /// Lets the active try again what this host had no room for.
    fn retry_disk_writes(&mut self) -> Result<Option<Cause>> {
        // Whether it may is seen by what happens.
        let _ = self.active.qmp.execute("cont", &json!({}));
        let deadline = Instant::now() + REFUSED;
        while Instant::now() < deadline {
            match self.active.qmp.event(POLL) {
                Ok(Some(event)) if event.name == "GUEST_PANICKED" => return Ok(Some(Cause::Panic)),
                Ok(Some(event)) if event.is_host_disk_full() => {
                    self.full = Some(Instant::now());
                    return Ok(None);
                }
                Ok(_) => {}
                Err(_) => return Ok(Some(self.active_has_ended())),
            }
        }
        self.full = None;
        if let Some(heartbeats) = &mut self.active.heartbeats {
            heartbeats.reset();
        }
        Ok(None)
    }

    /// The disk's image, while this host has no room for what the service writes to it. The service stands still then,
    /// which is no failure of its kernel and would be no better in the backup, and goes on when [`watch`](Self::watch)
    /// finds room.
    #[must_use]
    pub fn full_disk(&self) -> Option<&Path> {
        self.full.and(self.disk.as_ref()).map(Disk::image)
    }

    /// Moves the service to the backup, which becomes the active. The old active never runs again.
    ///
    /// # Errors
    ///
    /// What the backup said; the dead machine's memory is then kept, and this may be tried again. Where it was asked
    /// for and not needed ([`Cause::Request`]), and the service cannot be carried over, it goes on where it is.
    pub fn fail_over(&mut self, cause: Cause) -> Result<Failover> {
        let start = Instant::now();
        let mut steps = Vec::new();
        if let (Cause::Request, Some(image)) = (cause, self.full_disk()) {
            let why = "this host has no room for what the service writes to it; make some first".to_owned();
            return Err(Error::Disk { path: image.to_owned(), why });
        }
        if self.incomplete && self.active.control.lazy_pages().is_none() {
            return Err(self.service_lost("it died before all of the service's memory had come"));
        }
        if !self.backup_is_alive() {
            // It died, now or before. The memory is still there, for a new one to read.
            let seconds = self.start_backup()?;
            steps.push(Step { name: "new backup".to_owned(), seconds });
        }
        let Some(mut backup) = self.backup.take() else {
            return Err(unexpected_report(&self.active.machine));
        };
        let mut remarks = Vec::new();
        let restored = self.restore_on(&mut backup, cause, &mut steps, &mut remarks);
        let (pid, rebuilt, mut summary) = match restored {
            Ok(Report::Restored { pid, steps, summary }) => (pid, steps, summary),
            other => {
                let error = other.err().unwrap_or_else(|| unexpected_report(&backup.machine));
                if backup.online {
                    let (machine, why) = (backup.machine.name().to_owned(), error.to_string());
                    return Err(Error::Gone { machine, why });
                }
                // The memory was only read, so this may be tried again. By the same backup only where it is there to be
                // asked, and has made nothing yet: semaphores, files and half of a restore are in the way of another
                // one.
                let spent = backup.restore_started || matches!(error, Error::Timeout { .. });
                let failure_reason = backup.failure_reason(CLOSING).is_some();
                backup.state = NodeState::Standby;
                self.backup = Some(backup);
                if spent || failure_reason {
                    self.discard_backup(&error);
                }
                return Err(error);
            }
        };
        backup.state = NodeState::Serving;
        steps.extend(rebuilt);
        summary.remarks.splice(0..0, remarks);
        let seconds = start.elapsed().as_secs_f64();
        self.dead = Some(std::mem::replace(&mut self.active, backup).machine);
        self.incomplete = summary.lazy_pages > 0;
        self.full = None;
        self.registers.clear();
        self.failovers += 1;
        self.pid = pid;
        Ok(Failover { cause, steps, seconds, summary })
    }

    fn service_lost(&self, why: &str) -> Error {
        Error::Gone { machine: self.active.machine.name().to_owned(), why: why.to_owned() }
    }

    /// Waits until all of the service's memory has come to the survivor, where a part of it comes later, and lets go of
    /// the dead machine's; gives what came since the last failover, the first time that it is asked.
    ///
    /// # Errors
    ///
    /// [`Error::Gone`] where the survivor dies before: the service is lost. [`Error::Guest`] where it says why it could
    /// not have its memory, [`Error::Timeout`].
    pub fn wait_for_lazy_pages(&mut self) -> Result<Option<LazyPages>> {
        let mut came = None;
        let deadline = Instant::now() + WHOLE;
        while self.incomplete {
            if let Some((pages, seconds)) = self.active.control.lazy_pages() {
                came = Some(LazyPages { pages, seconds });
                self.incomplete = false;
            } else if let Some(failure) = self.active.control.take_failure() {
                return Err(failure);
            } else if !self.active.machine.runs() || self.poll_events()?.is_some() {
                return Err(self.service_lost("it died before all of the service's memory had come"));
            } else if Instant::now() > deadline {
                return Err(Error::Timeout {
                    machine: self.active.machine.name().to_owned(),
                    seconds: WHOLE.as_secs(),
                    what: "all of the service's memory".to_owned(),
                    hint: String::new(),
                });
            }
        }
        if let Some(dead) = self.dead.take() {
            dead.release_memory()?;
        }
        Ok(came)
    }

    /// Fences the active, gives the backup what it had, and lets the backup rebuild the service.
    fn restore_on(
        &mut self,
        backup: &mut Node,
        cause: Cause,
        steps: &mut Vec<Step>,
        remarks: &mut Vec<String>,
    ) -> Result<Report> {
        let start = Instant::now();
        if let Some(error) = self.pause_active() {
            remarks.push(format!("the active was killed, with what its processors held, as {error}"));
        }
        if let Some(network) = &self.network {
            network.detach(&self.active.port)?;
            // What comes from now on waits in the backup's card, which is not switched on before the connections are
            // there.
            network.attach(&backup.port)?;
        }
        // It stands still, and can go on: where nothing else is asked for, or for a moment.
        let stands = matches!(cause, Cause::Request | Cause::Silence) && self.active.machine.runs();
        if !stands {
            self.kill_active(backup);
        }
        steps.push(Step { name: "fence".to_owned(), seconds: start.elapsed().as_secs_f64() });
        let mut moments = if stands && cause == Cause::Silence { MOMENTS } else { 0 };
        while let Err(error) = self.read_service(backup, stands && cause == Cause::Request) {
            let is_told = matches!(error, Error::Guest { .. });
            if stands && cause == Cause::Request {
                self.resume_active(backup)?;
            } else if is_told && moments > 0 && self.run_active_for_a_moment() {
                moments -= 1;
                continue;
            } else if stands {
                self.kill_active(backup);
            }
            return Err(error);
        }
        if stands {
            self.kill_active(backup);
            self.plug(backup)?;
        }
        backup.restore_started = true;
        backup.start_restoring(&Request::Restore)?;
        let said = backup.expect("the service to be rebuilt", RESCUE)?;
        let Report::Online = said else { return Ok(said) };
        backup.online = true;
        backup.expect("the service to live again", RESCUE)
    }

    /// Has the backup read the service from the active's memory; `strict` refuses to leave anything out.
    fn read_service(&self, backup: &mut Node, strict: bool) -> Result<()> {
        let request = Request::ReadService { pid: self.pid, registers: self.registers.clone(), strict };
        backup.start_restoring(&request)?;
        self.plug(backup)?;
        match backup.expect("the service to be read", RESCUE)? {
            Report::ImagesWritten => Ok(()),
            _ => Err(unexpected_report(&backup.machine)),
        }
    }

    /// Lets what still runs of the active go on for a moment, and pauses it again: a thread that was just entering or leaving the
    /// kernel, with its registers half saved, is somewhere else then. What it sends meanwhile goes nowhere, as what a dying
    /// machine has sent last may. Returns whether that was done.
    fn run_active_for_a_moment(&mut self) -> bool {
        self.registers.clear();
        if self.active.qmp.execute("cont", &json!({})).is_err() {
            return false;
        }
        std::thread::sleep(MOMENT);
        self.pause_active().is_none()
    }

    /// Pauses the active and notes what its processors hold; kills it, and returns why, where it does not answer. Its
    /// memory is there all the same: what is lost is the threads that were on a processor.
    fn pause_active(&mut self) -> Option<Error> {
        if !self.active.machine.runs() {
            return None;
        }
        let patience = FENCE.max(self.patience);
        // What it had asked its disk for is done then, and what it does not do now it never will.
        let paused = self.active.qmp.execute_within("stop", &json!({}), patience);
        match paused.and_then(|_| self.active.qmp.human_within("info registers -a", patience)) {
            Ok(registers) => {
                self.registers = registers;
                None
            }
            Err(error) => {
                self.active.machine.kill();
                Some(error)
            }
        }
    }

    /// Ends the active for good. Its memory stays; its disk is nobody's now.
    fn kill_active(&mut self, backup: &mut Node) {
        self.active.machine.kill();
        backup.needs_disk = self.disk.is_some() && !backup.has_disk;
    }

    /// Plugs the disk into the backup, if nobody has it any more.
    fn plug(&self, backup: &mut Node) -> Result<()> {
        if let (Some(disk), true) = (&self.disk, backup.needs_disk) {
            disk.plug(&mut backup.qmp)?;
            (backup.has_disk, backup.needs_disk) = (true, false);
        }
        Ok(())
    }

    /// Lets the active go on as if nothing had been tried.
    fn resume_active(&mut self, backup: &Node) -> Result<()> {
        if let Some(network) = &self.network {
            network.detach(&backup.port)?;
            network.attach(&self.active.port)?;
        }
        self.active.qmp.execute("cont", &json!({}))?;
        if let Some(heartbeats) = &mut self.active.heartbeats {
            heartbeats.reset();
        }
        Ok(())
    }

    /// Ends the service and both machines, the service's disk unmounted.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] where the disk could not be unmounted, [`Error::Timeout`].
    pub fn stop(mut self) -> Result<()> {
        self.backup = None;
        self.active.control.send(&Request::Stop)?;
        match self.active.expect("the service to end", END)? {
            Report::Stopped => Ok(()),
            _ => Err(unexpected_report(&self.active.machine)),
        }
    }

    /// Starts the service again, as [`reboot`](Self::reboot) does, with its disk unmounted in between.
    ///
    /// # Errors
    ///
    /// As [`reboot`](Self::reboot); a disk that cannot be unmounted is found as a crash would have left it.
    pub fn restart(&mut self) -> Result<()> {
        self.backup = None;
        if self.active.control.send(&Request::Stop).is_ok() {
            // What it says does not matter: the machine is ended in any case.
            let _ = self.active.expect("the service to end", END);
        }
        self.reboot()
    }

    /// Returns what both machines have in common.
    fn shared(&self) -> Shared<'_> {
        let (network, disk) = (self.network.as_ref(), self.disk.as_ref());
        Shared { kernel: &self.kernel, image: &self.image, network, disk }
    }

    /// Boots the service's machine again, as one does who has no backup: what was in its memory is lost. There is no
    /// backup then until [`renew`](Self::start_backup).
    ///
    /// # Errors
    ///
    /// As [`up`](Self::start).
    pub fn reboot(&mut self) -> Result<()> {
        self.backup = None;
        self.active.machine.kill();
        (self.dead, self.incomplete, self.full) = (None, false, None);
        self.generation += 1;
        let active = Node::start(&self.config, &self.shared(), self.generation, None)?;
        if let Some(network) = &self.network {
            network.detach(&self.active.port)?;
            network.attach(&active.port)?;
        }
        self.active = active;
        self.registers.clear();
        self.pid = self.wait_for_service()?;
        Ok(())
    }

    /// Starts a new backup, for the survivor of a failover, when it has [settled](Self::wait_for_lazy_pages), or in
    /// place of one that died, and gives how long that took, in seconds.
    ///
    /// # Errors
    ///
    /// As [`up`](Self::start).
    pub fn start_backup(&mut self) -> Result<f64> {
        self.wait_for_lazy_pages()?;
        let begin = Instant::now();
        if let (Some(dead), Some(network)) = (self.backup.take(), &self.network) {
            network.detach(&dead.port)?;
        }
        self.generation += 1;
        let peer = Some(&self.active.machine);
        self.backup = Some(Node::start(&self.config, &self.shared(), self.generation, peer)?);
        if let Err(error) = self.arm() {
            // It does not know the active's kernel, and could not take over.
            self.discard_backup(&error);
            return Err(error);
        }
        Ok(begin.elapsed().as_secs_f64())
    }
}

fn unexpected_report(machine: &Machine) -> Error {
    Error::Guest {
        machine: machine.name().to_owned(),
        why: "it said something else than was asked".to_owned(),
    }
}
