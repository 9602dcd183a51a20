//! The active guest: it runs the service and shows, processor by processor, that it lives.

use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::control::{Asked, Control, Said};
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
    service.make_folders(disk::place().as_deref())?;
    let nest = nest::start(&Job::Service(&service), || ())?;
    let (pid, _) = nest::service(nest).context("the service ended at once")?;
    Control::open()?.say(&Said::Ready { pid })?;
    changes.keep(false);
    serve(nest)
}

/// What the guest with the service does besides: heartbeats, and what it is asked.
pub(crate) fn serve(nest: i32) -> Result<()> {
    let mut control = Control::open()?;
    let (physical, cpus) = beats::start().context("cannot send heartbeats")?;
    control.say(&Said::Beats { physical, cpus })?;
    loop {
        match control.listen()? {
            Asked::Knock => control.say(&Said::Alive)?,
            Asked::Run { argv } => {
                let (status, output) = match setup::output(&argv) {
                    Ok(answer) => answer,
                    Err(error) => (-1, format!("{error:#}")),
                };
                control.say(&Said::Ran { status, output })?;
            }
            Asked::Crash { kind, bait } => {
                if let Err(error) = crash::crash(&kind, bait) {
                    control.say(&Said::Failed { why: format!("{error:#}") })?;
                }
            }
            Asked::End => {
                nest::end(nest);
                match disk::unmount() {
                    Ok(()) => control.say(&Said::Ended)?,
                    Err(error) => control.say(&Said::Failed { why: format!("{error:#}") })?,
                }
            }
            Asked::Arm | Asked::Weigh { .. } | Asked::Read { .. } | Asked::Rebuild => {
                control.say(&Said::Failed { why: "this is the guest with the service".to_owned() })?;
            }
        }
    }
}
