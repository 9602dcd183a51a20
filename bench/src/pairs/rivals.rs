//! Alternatives to a pair: how long a client waits, and what it loses.
//!
//! All of them reboot the machine, as we boot it: with QEMU's own firmware, which takes a tenth of a second where a real
//! machine's takes half a minute. So all waits here are the least there can be.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use orrery_orthros_host::{Fault, Initramfs, KernelFiles, cache, command};

use super::{Client, LineClient, PairSpec, Running, TIMEOUT};
use crate::contender::Skipped;

/// The port of `orrery-orthros-load ballast`.
pub const PORT: u16 = 7;
/// The service that has as little as a service can: a MiB, no files, one thread.
pub const LEAST: [&str; 5] = ["orrery-orthros-load", "ballast", "1", "0", "0"];
/// A checkpoint may take as long as this before it counts as none.
const CHECKPOINTS: Duration = Duration::from_secs(60);
/// How long a service is under way before its kernel dies.
const LIFE: Duration = Duration::from_millis(3500);

/// What a client saw.
#[derive(Clone, Copy, Debug)]
pub struct Waited {
    /// From the kernel's death to the first answer, over a new connection, in seconds.
    pub seconds: f64,
    /// Answers that it had been given and that the service does not know of any more.
    pub lost: u64,
}

/// Measures from the death of a machine to the first answer of the service that is started again.
pub fn reboot() -> Result<Waited> {
    let mut running = Running::start(&PairSpec {
        service: &LEAST,
        programs: &[],
        files: &[],
        memory: 256,
        append: "",
        disk: None,
    })?;
    let mut client = Client::start(PORT, "\n")?;
    sleep(LIFE);
    let lost = client.end()?;
    let begin = Instant::now();
    running.pair.reboot()?;
    LineClient::connect(PORT)?.ask("\n")?;
    Ok(Waited { seconds: begin.elapsed().as_secs_f64(), lost })
}

/// Measures with kdump: the dying kernel starts another one, in memory that was reserved for it, which boots the machine.
/// It would write the dead memory to a disk before that, and does not here.
///
/// # Errors
/// [`Skipped`] without kexec; where anything fails.
pub fn kdump() -> Result<Waited> {
    command::require("kexec", "kexec-tools").map_err(|error| Skipped(error.to_string()))?;
    let directory = tempfile::tempdir().context("cannot make a directory")?;
    let kernel = KernelFiles::obtain(&cache())?;
    let small = directory.path().join("crash");
    let mut image = Initramfs::new();
    image.program(&command::require("busybox", "busybox-static")?, "/bin/busybox")?;
    image.file("/init", "#!/bin/busybox sh\n/bin/busybox reboot -f\n", 0o755);
    image.write(&small)?;
    let (kernel, small) = (kernel.image.display().to_string(), small.display().to_string());
    let mut running = Running::start(&PairSpec {
        service: &LEAST,
        programs: &["kexec"],
        files: &[(&kernel, "/boot/vmlinuz"), (&small, "/boot/crash")],
        memory: 512,
        append: "crashkernel=160M",
        disk: None,
    })?;
    let line = "--append=console=ttyS0 quiet no_timer_check nr_cpus=1 reset_devices";
    running.pair.run(&["kexec", "-p", "-s", "/boot/vmlinuz", "--initrd=/boot/crash", line])?;
    let mut client = Client::start(PORT, "\n")?;
    sleep(LIFE);
    let lost = client.end()?;
    let begin = Instant::now();
    running.pair.crash(Fault::Panic)?;
    while running.pair.active_is_alive() {
        ensure!(begin.elapsed() < TIMEOUT, "the kernel for crashes does not boot the machine");
        sleep(Duration::from_millis(2));
    }
    running.pair.reboot()?;
    LineClient::connect(PORT)?.ask("\n")?;
    Ok(Waited { seconds: begin.elapsed().as_secs_f64(), lost })
}

/// The service. Where there is a checkpoint of it, only a process that holds its namespaces, into which criu restores it. Its PID is one
/// that is free then, too.
const CHECKPOINTED: &str = "\
[ -e /data/last ] && exec sleep 100000
echo 100 > /proc/sys/kernel/ns_last_pid
setsid orrery-orthros-load ballast 1 0 0 &
wait";

/// Lets criu make a checkpoint of the service on its disk once a second.
const CHECKPOINTS_EACH_SECOND: &str = "\
one=0
while sleep 1; do
    one=$((1 - one))
    rm -rf /data/$one
    mkdir /data/$one
    criu dump -t $(pidof orrery-orthros-load) --leave-running --tcp-established -D /data/$one -W /run -o dump.log || continue
    sync
    echo $one > /data/new
    mv /data/new /data/last
    sync
done > /dev/null 2>&1 &";

/// Goes on from the last checkpoint.
const RESTORED: &str =
    "criu restore --restore-detached -D /data/$(cat /data/last) -W /run -o restore.log --tcp-close";

/// Runs a script in the namespaces of the service, to which `program` belongs. It is no child of the service: those inherit its filter of
/// system calls, and the kernel lets no process with a filter suspend others', as criu does.
fn run_beside(running: &mut Running, program: &str, script: &str) -> Result<()> {
    let enter = format!("exec nsenter -t $(pidof {program}) -m -p busybox sh -c '{script}'");
    running.pair.run(&["busybox", "sh", "-c", &enter])?;
    Ok(())
}

/// Measures with a checkpoint each second: after the boot criu restores the last one. Its connections are gone.
pub fn checkpoints() -> Result<Waited> {
    // criu has packets of connections dropped while it looks at them. Here they get through, which saves it that time.
    let directory = tempfile::tempdir().context("cannot make a directory")?;
    let filter = directory.path().join("iptables");
    fs::write(&filter, "#!/bin/busybox sh\nexit 0\n").context("cannot write a script")?;
    fs::set_permissions(&filter, fs::Permissions::from_mode(0o755))
        .context("cannot make a script executable")?;
    let filter = filter.display().to_string();
    let mut running = Running::start(&PairSpec {
        service: &["busybox", "sh", "-c", CHECKPOINTED],
        programs: &["orrery-orthros-load"],
        files: &[(&filter, "/usr/sbin/iptables"), (&filter, "/usr/sbin/ip6tables")],
        memory: 256,
        append: "",
        disk: Some((256, None)),
    })?;
    let client = Client::start(PORT, "\n")?;
    run_beside(&mut running, "orrery-orthros-load", CHECKPOINTS_EACH_SECOND)?;
    let begin = Instant::now();
    while let Err(error) = running.pair.run(&["test", "-e", "/data/last"]) {
        ensure!(
            begin.elapsed() < CHECKPOINTS,
            "criu makes no checkpoint: {error}; {}",
            log_of(&mut running, "dump")
        );
        sleep(Duration::from_millis(200));
    }
    sleep(LIFE);
    let begin = Instant::now();
    running.pair.crash(Fault::Panic)?;
    running.pair.watch(TIMEOUT)?.context("the kernel does not die")?;
    let counted = client.counted();
    running.pair.reboot()?;
    let answer = run_beside(&mut running, "sleep", RESTORED)
        .and_then(|()| LineClient::connect(PORT))
        .and_then(|mut line| line.ask("\n"));
    let seconds = begin.elapsed().as_secs_f64();
    let answer = answer.with_context(|| log_of(&mut running, "restore"))?;
    let first: u64 = answer.parse().with_context(|| format!("{answer:?} is no number"))?;
    Ok(Waited { seconds, lost: (counted + 1).saturating_sub(first) })
}

/// Returns the end of one of criu's logs in the guest.
fn log_of(running: &mut Running, log: &str) -> String {
    let path = format!("/run/{log}.log");
    running.pair.run(&["tail", "-n", "5", &path]).unwrap_or_else(|error| error.to_string())
}
