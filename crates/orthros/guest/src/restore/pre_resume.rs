//! The stage `pre-resume` of a restore, at which the service comes onto the network: everything is restored, and its threads do
//! not run yet.
//!
//! criu starts this program then (`--action-script`). What arrived over the network since the old machine was fenced waits in the
//! network card and is delivered when the interface is up, some of it before there is a route for the answer. If the service ran
//! already, its answer would be lost and repeated after a second.
//!
//! From here on the service acts on what the old machine does not know of: there is no second try from that memory, which the
//! host learns before.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use orrery_orthros_images::RestoreState;
use orrery_orthros_wire::Report;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::control::Control;
use crate::network::configuration::NetworkConfiguration;
use crate::network::{datagrams, interface, loopback, resets, tcp_kick};
use crate::restore::open_files;
use crate::{disk, writeback};

/// The environment variables with which criu passes the stage, and the directory of the images.
const STAGE: &str = "CRTOOLS_SCRIPT_ACTION";
const IMAGES: &str = "CRTOOLS_IMAGE_DIR";
const OUTCOME: &str = "/run/orrery/online";
/// Exists from the moment on at which the service may act on what others see.
const BEGUN: &str = "/run/orrery/going-online";

/// When the service came onto the network, by `CLOCK_MONOTONIC`, and what did not work.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// When that started, and when it was done.
    pub(crate) from: Duration,
    pub(crate) to: Duration,
    /// What did not work, as sentences.
    pub(crate) remarks: Vec<String>,
}

/// Returns `CLOCK_MONOTONIC`.
pub(crate) fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns the stage for which criu has started this program, if it has.
pub(crate) fn stage() -> Option<String> {
    std::env::var(STAGE).ok()
}

/// Runs as criu's action script at a stage.
pub(crate) fn run(stage: &str) -> Result<()> {
    if stage != "pre-resume" {
        return Ok(());
    }
    let from = now();
    let tidied = disk::mount_point().map_or(Ok(()), |mount_point| writeback::finish(&mount_point));
    fs::write(BEGUN, "").with_context(|| format!("cannot write {BEGUN}"))?;
    Control::open()?.send(&Report::Online)?;
    let images = std::env::var(IMAGES).with_context(|| format!("criu did not set {IMAGES}"))?;
    // Without it, sockets would be open to what their filters drop.
    let state = RestoreState::load(Path::new(&images))?;
    // Before anything can arrive.
    let unset = open_files::restore(&state);
    // Both ends of the service's connections with itself exist now.
    let opened = loopback::open();
    // Before anything arrives from elsewhere.
    let sent = datagrams::send(&state.datagrams);
    let configuration = NetworkConfiguration::load();
    let changed = configuration.as_ref().ok().and_then(Option::as_ref);
    let rules = changed.map_or(Ok(()), NetworkConfiguration::restore_rules);
    interface::bring_up()?;
    let lost_routes = match changed {
        Some(configuration) => configuration.restore_routes(),
        None => interface::add_default_route().map(|()| Vec::new())?,
    };
    let kicked = tcp_kick::kick(&state.connections);
    let reset = resets::send(&state.pending_connections);
    let remark = |result: Result<()>, what: &str| result.err().map(|error| format!("{what}{error:#}"));
    let remarks = [
        remark(kicked, "the peers of connections wait longer: "),
        remark(opened, "the service does not reach itself: "),
        remark(sent, "datagrams that were not read are lost: "),
        remark(reset, "the peers of connections that were not accepted are not notified: "),
        remark(rules, ""),
        remark(tidied, ""),
    ];
    let remarks = remarks.into_iter().flatten().chain(lost_routes).chain(unset).collect();
    let outcome = Outcome { from, to: now(), remarks };
    fs::write(OUTCOME, serde_json::to_vec(&outcome)?).with_context(|| format!("cannot write {OUTCOME}"))
}

/// Returns whether the service was about to come onto the network: it must not be restored from the same memory again.
pub(crate) fn has_begun() -> bool {
    Path::new(BEGUN).exists()
}

/// Returns when the service came onto the network, and what did not work; `None` if it did not.
pub(crate) fn outcome() -> Option<Outcome> {
    serde_json::from_slice(&fs::read(OUTCOME).ok()?).ok()
}
