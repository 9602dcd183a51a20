//! The active guest: it runs the service and shows, processor by processor, that it lives.

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use orrery_orthros_wire::{Report, Request};

use crate::control::Control;
use crate::nest::Job;
use crate::network::Changes;
use crate::service::Service;
use crate::{beats, crash, disk, nest, setup};

/// How long the disk that the machine started with may take to appear.
const PLUGGED: Duration = Duration::from_secs(10);

pub(crate) fn run() -> Result<()> {
    let service = Service::read()?;
    disk::mount_own(PLUGGED)?;
    let changes = Changes::listen()?;
    service.create_directories(disk::place().as_deref())?;
    let nest = nest::start(&Job::Service(&service), || ())?;
    let (pid, _) = nest::service(nest).context("the service ended at once")?;
    Control::open()?.send(&Report::Ready { pid })?;
    changes.keep(false);
    serve(nest)
}

/// What the guest with the service does besides: heartbeats, and what it is asked.
pub(crate) fn serve(nest: i32) -> Result<()> {
    let mut control = Control::open()?;
    let (physical, cpus) = beats::start().context("cannot send heartbeats")?;
    control.send(&Report::Heartbeats { physical, cpus })?;
    loop {
        match control.receive()? {
            Request::Ping => control.send(&Report::Pong)?,
            Request::Run { argv } => control.send(&setup::run_for_host(&argv))?,
            Request::Crash { kind, trigger } => {
                if let Err(error) = crash::crash(&kind, trigger) {
                    control.send_error(&error)?;
                }
            }
            Request::Stop => {
                nest::end(nest);
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
