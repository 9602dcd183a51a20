//! Lets the kernel drop its caches, as when memory runs out: names, inodes and clean contents of files, again and again.
//! Contents are written to the disk at once and dropped, long before the journal commits what leads to them.

use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};

/// Contents are old enough for the disk after so many hundredths of a second, and looked for as often.
const SETTINGS: [&str; 2] = ["dirty_expire_centisecs", "dirty_writeback_centisecs"];
const EVERY: Duration = Duration::from_millis(20);

fn set(name: &str, value: &str) -> Result<()> {
    let path = format!("/proc/sys/vm/{name}");
    fs::write(&path, value).with_context(|| format!("cannot write {path}"))
}

/// Starts dropping caches in a process of its own, which is no part of the service.
pub(crate) fn start() -> Result<()> {
    for setting in SETTINGS {
        set(setting, "10")?;
    }
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(program);
    command.args(["drop-caches", "loop"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().context("cannot start this program")?;
    Ok(())
}

/// Drops caches until the process is killed.
pub(crate) fn run() -> Result<()> {
    loop {
        set("drop_caches", "3")?;
        std::thread::sleep(EVERY);
    }
}
