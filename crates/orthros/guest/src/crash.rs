//! Ways for a kernel to die, on purpose and without a module of ours.

use std::fs;
use std::io;

use anyhow::{Context as _, Result, bail};

/// Lets this kernel die. `trigger` is a file that the host has made deadly to read, for the ways that need one.
///
/// # Errors
///
/// Where that cannot be done; the kernel then lives.
pub(crate) fn crash(kind: &str, trigger: Option<String>) -> Result<()> {
    match kind {
        "panic" => Ok(fs::write("/proc/sysrq-trigger", "c")?),
        "oom" => exhaust(),
        "oops" | "hang" | "spin" | "lockup" => {
            set("panic_on_oops", "1")?;
            if kind == "lockup" {
                // A processor that nothing else runs on for twice this is locked up.
                set("watchdog_thresh", "1")?;
                set("softlockup_panic", "1")?;
            }
            let trigger = trigger.context("the host has prepared no file to read")?;
            std::thread::spawn(move || fs::read(trigger));
            Ok(())
        }
        other => bail!("no way to die is called {other:?}"),
    }
}

fn set(name: &str, value: &str) -> Result<()> {
    let path = format!("/proc/sys/kernel/{name}");
    fs::write(&path, value).with_context(|| format!("cannot write {path}"))
}

/// Takes memory until there is none, where that is a reason to panic.
fn exhaust() -> Result<()> {
    let path = "/proc/sys/vm/panic_on_oom";
    fs::write(path, "2").with_context(|| format!("cannot write {path}"))?;
    std::thread::spawn(|| {
        const STEP: usize = 4 << 20;
        loop {
            // SAFETY: an anonymous mapping at a place of the kernel's choice disturbs nothing.
            let memory = unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
                libc::mmap(std::ptr::null_mut(), STEP, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
            };
            if memory == libc::MAP_FAILED {
                return io::Error::last_os_error();
            }
        }
    });
    Ok(())
}
