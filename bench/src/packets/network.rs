//! Two network namespaces with a veth pair between them.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::Skipped;

/// The receivers' address. It exists in their namespace only.
pub(crate) const RECEIVERS: &str = "10.99.0.1";
const SENDER: &str = "10.99.0.2";

/// Moves this process into a network namespace of its own.
pub(crate) fn leave() -> Result<()> {
    // SAFETY: changes which network this process sees.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        let cause = std::io::Error::last_os_error();
        return Err(Skipped(format!("a network namespace: {cause}")).into());
    }
    Ok(())
}

/// Makes the pair, its other end in the namespace of process `sender`.
pub(crate) fn connect(sender: u32) -> Result<()> {
    ip(&["link", "add", "orrery0", "type", "veth", "peer", "name", "orrery1", "netns", &sender.to_string()])?;
    ip(&["address", "add", &format!("{RECEIVERS}/24"), "dev", "orrery0"])?;
    ip(&["link", "set", "orrery0", "up"])
}

/// Configures the sender's end.
pub(crate) fn configure_sender() -> Result<()> {
    ip(&["address", "add", &format!("{SENDER}/24"), "dev", "orrery1"])?;
    ip(&["link", "set", "orrery1", "up"])
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(arguments).output().context("cannot run ip")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {}: {}", arguments.join(" "), errors.trim());
    Ok(())
}
