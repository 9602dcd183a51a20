//! The backup guest: it sees the active's memory, and restores the service from it.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result, anyhow, bail};
use orrery_kimage::{Kernel, Layout, MappedMemory};
use orrery_orthros_wire::{Report, Request};

use crate::control::Control;
use crate::heartbeat::standby::StandbyHeartbeat;
use crate::network::configuration::ChangeMonitor;
use crate::network::interface;
use crate::restore::{self, Images};
use crate::{active, command, crash, heartbeat, writeback};

/// QEMU's inter-VM shared memory device (`docs/specs/ivshmem-spec.rst`).
const VENDOR: &str = "0x1af4";
const DEVICE: &str = "0x1110";
const MIB: u64 = 1 << 20;

pub(crate) fn run() -> Result<()> {
    let mut control = Control::open()?;
    let processors = heartbeat::processors()?;
    let standby = StandbyHeartbeat::start(&processors).context("cannot start the heartbeat")?;
    control.send(&Report::StandbyHeartbeats { physical: standby.physical, cpus: standby.cpus })?;
    control.send(&Report::BackupReady)?;
    // The first run of criu probes the kernel for a second, and caches in /run what it finds.
    let _ = command::output(&["criu", "check"]);
    let mut active_kernel: Option<Arc<Kernel>> = None;
    let mut images: Option<Images> = None;
    loop {
        match control.receive()? {
            Request::Arm => match arm() {
                Ok((kernel, seconds)) => {
                    let release = kernel.info().release().to_owned();
                    active_kernel = Some(Arc::new(kernel));
                    control.send(&Report::Armed { release, seconds })?;
                }
                Err(error) => control.send_error(&error)?,
            },
            Request::Ping => {
                if heartbeat::visit(&processors) {
                    control.send(&Report::Pong)?;
                }
            }
            Request::EstimateMemory { pid } => {
                // Of a kernel that is alive, lists and tables may be changing: what cannot be read now is requested again.
                let required = active_kernel
                    .as_deref()
                    .map(|kernel| orrery_orthros_images::estimate_memory(kernel, pid));
                if let (Some(Ok(required)), Some(available)) = (required, restore::available_memory()) {
                    let (required_mib, available_mib) = (required.div_ceil(MIB), available / MIB);
                    control.send(&Report::MemoryEstimate { required_mib, available_mib })?;
                }
            }
            Request::ReadService { pid, registers, strict } => {
                let written = active_kernel
                    .as_deref()
                    .context("the backup is not armed")
                    .and_then(|kernel| restore::write_images(kernel, pid, &registers, strict));
                match written {
                    Ok(written) => {
                        images = Some(written);
                        control.send(&Report::ImagesWritten)?;
                    }
                    Err(error) => control.send_error(&error)?,
                }
            }
            Request::Restore => match restore(active_kernel.as_ref(), images.take()) {
                Ok((init, report)) => {
                    control.send(&report)?;
                    interface::remove_standby_route();
                    standby.stop();
                    // The configuration must survive the next failover, too, and this guest may have changed it.
                    ChangeMonitor::open()?.start(true);
                    restore::remove_images();
                    // From here on this guest is the active.
                    return active::serve(init, control);
                }
                Err(error) => control.send_error(&error)?,
            },
            Request::Run { argv } => control.send(&command::run_for_host(&argv))?,
            Request::Crash { kind, trigger } => {
                if let Err(error) = crash::crash(&kind, trigger) {
                    control.send_error(&error)?;
                }
            }
            Request::Stop => {
                control.send_error(&anyhow!("this is the backup, and does not have the service"))?
            }
        }
    }
}

fn restore(kernel: Option<&Arc<Kernel>>, images: Option<Images>) -> Result<(i32, Report)> {
    let kernel = kernel.context("the backup is not armed")?;
    restore::restore(kernel, images.context("the service has not been read")?)
}

/// Returns the file that is the active's memory.
fn active_memory() -> Result<PathBuf> {
    for entry in fs::read_dir("/sys/bus/pci/devices")?.flatten() {
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        if read("vendor").trim() == VENDOR && read("device").trim() == DEVICE {
            fs::write(entry.path().join("enable"), "1").context("cannot enable the memory device")?;
            return Ok(entry.path().join("resource2"));
        }
    }
    bail!("this guest has no device with another one's memory")
}

/// Reads the types and symbols of the active's kernel while it is alive, and returns how long that took, in seconds.
fn arm() -> Result<(Kernel, f64)> {
    let start = Instant::now();
    let memory = MappedMemory::open(&active_memory()?, Layout::Q35)?;
    let kernel = Kernel::open(Box::new(memory)).context("cannot read the active's kernel")?;
    writeback::preload_types(&kernel);
    Ok((kernel, start.elapsed().as_secs_f64()))
}
