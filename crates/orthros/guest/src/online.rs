//! The moment at which a rebuilt service comes onto the network: everything is there again, and its threads have not run yet.
//!
//! criu calls this program then (`--action-script`, at the stage `pre-resume`). What came over the network since the old
//! machine was fenced waits in the card and is delivered when the card is switched on, some of it before the kernel knows
//! which way an answer goes. Were the service running already, its answer would go astray and be repeated after a second.
//!
//! From here on the service acts on what the old machine does not know of: there is no second try from that memory, and the
//! host is told so before.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use orrery_orthros_wire::Report;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::control::Control;
use crate::datagrams::Datagrams;
use crate::network::Network;
use crate::resets::Resets;
use crate::{criu, disk, loopback, nudge, setup, writeback};

/// The stage of a restore, and the images, as criu tells them.
const STAGE: &str = "CRTOOLS_SCRIPT_ACTION";
const IMAGES: &str = "CRTOOLS_IMAGE_DIR";
const REPORT: &str = "/run/orrery/online";

/// When the service came onto the network, by this machine's clock.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Online {
    /// When that began, and when it was done.
    pub(crate) from: Duration,
    pub(crate) to: Duration,
    /// What went wrong, if the service lives all the same.
    pub(crate) remarks: Vec<String>,
}

/// This machine's clock.
pub(crate) fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The stage that criu has called this program for, if it has.
pub(crate) fn stage() -> Option<String> {
    std::env::var(STAGE).ok()
}

/// What is to be done at a stage.
pub(crate) fn at(stage: &str) -> Result<()> {
    if stage != "pre-resume" {
        return Ok(());
    }
    let from = now();
    let tidied = disk::place().map_or(Ok(()), |place| writeback::finish(&place));
    Control::open()?.send(&Report::Online)?;
    let images = std::env::var(IMAGES).with_context(|| format!("criu has not told {IMAGES}"))?;
    // Both ends of what the service has with itself are there.
    let opened = loopback::open();
    // Before anything comes from elsewhere.
    let sent = Datagrams::read(Path::new(&images)).and_then(|datagrams| datagrams.send());
    let network = Network::kept();
    let kept = network.as_ref().ok().and_then(Option::as_ref);
    let unruly = kept.map_or(Ok(()), Network::put_rules_back);
    setup::go_online()?;
    let strayed = match kept {
        Some(network) => network.put_ways_back(),
        None => setup::find_way().map(|()| Vec::new())?,
    };
    let nudged = criu::connections(Path::new(&images)).and_then(|connections| nudge::nudge(&connections));
    let told = Resets::read(Path::new(&images)).and_then(|resets| resets.send());
    let nudged = nudged.err().map(|error| format!("the other sides of connections wait longer: {error:#}"));
    let lost = sent.err().map(|error| format!("datagrams that were not read are lost: {error:#}"));
    let unheard = told.err().map(|error| format!("who was not accepted does not hear of it: {error:#}"));
    let shut = opened.err().map(|error| format!("the service does not reach itself: {error:#}"));
    let words = |error: anyhow::Error| format!("{error:#}");
    let others = [nudged, shut, lost, unheard, unruly.err().map(words), tidied.err().map(words)];
    let remarks = others.into_iter().flatten().chain(strayed).collect();
    let online = Online { from, to: now(), remarks };
    fs::write(REPORT, serde_json::to_vec(&online)?).with_context(|| format!("cannot write {REPORT}"))
}

/// What was told then; nothing where it was not reached.
pub(crate) fn report() -> Option<Online> {
    serde_json::from_slice(&fs::read(REPORT).ok()?).ok()
}
