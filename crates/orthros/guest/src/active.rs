//! The active guest: it runs the service, and counts heartbeats on each processor.

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use orrery_orthros_wire::{Report, Request};

use crate::control::Control;
use crate::network::configuration::ChangeMonitor;
use crate::pidns::Job;
use crate::service::Service;
use crate::{command, crash, disk, heartbeat, pidns};

/// How long the disk that the machine started with may take to appear.
const PLUG_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn run() -> Result<()> {
    let service = Service::read()?;
    disk::mount_own(PLUG_TIMEOUT)?;
    let changes = ChangeMonitor::open()?;
    service.create_directories(disk::mount_point().as_deref())?;
    let init = pidns::start(&Job::Service(&service), || ())?;
    let (pid, _) = pidns::service(init).context("the service ended at once")?;
    let mut control = Control::open()?;
    control.send(&Report::Ready { pid })?;
    changes.start(false);
    serve(init, control)
}

/// Counts heartbeats and serves the host's requests, for the service in the PID namespace with this init process.
///
/// `control` stays open since the service was reported: the host may have sent requests since, and what a serial port has received is lost
/// when its last descriptor is closed.
pub(crate) fn serve(init: i32, mut control: Control) -> Result<()> {
    let (physical, cpus) = heartbeat::start().context("cannot start the heartbeat")?;
    control.send(&Report::Heartbeats { physical, cpus })?;
    loop {
        match control.receive()? {
            Request::Ping => control.send(&Report::Pong)?,
            Request::Run { argv } => control.send(&command::run_for_host(&argv))?,
            Request::Crash { kind, trigger } => {
                if let Err(error) = crash::crash(&kind, trigger) {
                    control.send_error(&error)?;
                }
            }
            Request::Stop => {
                pidns::end(init);
                match disk::unmount() {
                    Ok(()) => control.send(&Report::Stopped)?,
                    Err(error) => control.send_error(&error)?,
                }
            }
            Request::Arm
            | Request::EstimateMemory { .. }
            | Request::ReadService { .. }
            | Request::Restore => {
                control.send_error(&anyhow!("this guest has the service, and is no backup"))?;
            }
        }
    }
}
