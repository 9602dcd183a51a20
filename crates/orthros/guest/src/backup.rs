//! The backup guest: it sees the active's memory, and rebuilds the service from it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use orrery_kimage::{Kernel, Layout, MappedMemory};
use orrery_orthros_wire::{Report, Request, Step, Summary};

use crate::after::After;
use crate::borrowed::Borrowed;
use crate::control::Control;
use crate::ipc::Ipc;
use crate::later::{Later, Source};
use crate::network::{Changes, Network};
use crate::standby::Standby;
use crate::{active, beats, crash, criu, disk, elsewhere, later, loopback, nest, online, setup, writeback};

/// QEMU's inter-VM shared memory device (`docs/specs/ivshmem-spec.rst`).
const VENDOR: &str = "0x1af4";
const DEVICE: &str = "0x1110";
/// How long the dead guest's disk may take to appear.
const PLUGGED: Duration = Duration::from_secs(10);
const IMAGES: &str = "/run/orrery/images";
/// Where criu works.
const WORK: &str = "/run/orrery";
/// What the image has for criu to call: this program, at the stage that matters.
const HOOK: &str = "/etc/orrery/hook";
const MIB: u64 = 1 << 20;
/// From 64 MiB on, room matters more than the time it takes to free it.
const MANY_PAGES: u64 = 16 << 10;

pub(crate) fn run() -> Result<()> {
    let mut control = Control::open()?;
    let processors = beats::processors()?;
    let standby = Standby::begin(&processors).context("cannot show that this machine lives")?;
    control.send(&Report::StandbyHeartbeats { physical: standby.physical, cpus: standby.cpus })?;
    control.send(&Report::BackupReady)?;
    // The first run of criu probes the kernel for a second; its findings are kept in /run.
    let _ = setup::output(&["criu", "check"]);
    let mut known = None;
    let mut rescue = None;
    loop {
        match control.receive()? {
            Request::Arm => match arm() {
                Ok((kernel, seconds)) => {
                    let release = kernel.info().release().to_owned();
                    known = Some(Arc::new(kernel));
                    control.send(&Report::Armed { release, seconds })?;
                }
                Err(error) => control.send_error(&error)?,
            },
            Request::Ping => {
                if beats::visit(&processors) {
                    control.send(&Report::Pong)?;
                }
            }
            Request::EstimateMemory { pid } => {
                // Of a kernel that lives, lists and tables may be changing: what cannot be read now is asked for again.
                let needs = known.as_deref().map(|kernel| criu::weigh(kernel, pid));
                if let (Some(Ok(needs)), Some(has)) = (needs, available()) {
                    control.send(&Report::MemoryEstimate {
                        required_mib: needs.div_ceil(MIB),
                        available_mib: has / MIB,
                    })?;
                }
            }
            Request::ReadService { pid, registers, strict } => {
                match read(known.as_deref(), pid, &registers, strict) {
                    Ok(found) => {
                        rescue = Some(found);
                        control.send(&Report::ImagesWritten)?;
                    }
                    Err(error) => control.send_error(&error)?,
                }
            }
            Request::Restore => match rebuild(known.as_ref(), rescue.take()) {
                Ok((nest, report)) => {
                    control.send(&report)?;
                    setup::leave_standby();
                    standby.end();
                    // What it is now has to be kept by this guest, too, and this one may have changed it.
                    Changes::listen()?.keep(true);
                    // They are no use any more, and take memory that the service may want.
                    let _ = fs::remove_dir_all(IMAGES);
                    // From here on this guest is the active.
                    return active::serve(nest);
                }
                Err(error) => control.send_error(&error)?,
            },
            Request::Run { argv } => control.send(&setup::run_for_host(&argv))?,
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

/// The file that shows the active's memory.
fn window() -> Result<PathBuf> {
    for entry in fs::read_dir("/sys/bus/pci/devices")?.flatten() {
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        if read("vendor").trim() == VENDOR && read("device").trim() == DEVICE {
            fs::write(entry.path().join("enable"), "1").context("cannot enable the memory device")?;
            return Ok(entry.path().join("resource2"));
        }
    }
    bail!("this guest has no device that shows another one's memory")
}

/// Learns all about the active's kernel, while it lives.
fn arm() -> Result<(Kernel, f64)> {
    let start = Instant::now();
    let memory = MappedMemory::open(&window()?, Layout::Q35)?;
    let kernel = Kernel::open(Box::new(memory)).context("cannot read the active's kernel")?;
    writeback::rehearse(&kernel);
    Ok((kernel, start.elapsed().as_secs_f64()))
}

/// Lets more be mapped than there is memory, proc_sys_vm(5): criu makes each mapping writable first, of which the kernel
/// counts all against its memory, also what a service has reserved and never used (MariaDB: 8 TiB).
const OVERCOMMIT: (&str, &str) = ("/proc/sys/vm/overcommit_memory", "1");
/// No large pages while criu fills mappings: one would be there, of zeros, also where pages come later.
const NO_LARGE_PAGES: (&str, &str) = ("/sys/kernel/mm/transparent_hugepage/enabled", "never");

/// A setting of this kernel's that is another one as long as this lives.
struct Setting {
    path: &'static str,
    before: Option<String>,
}

impl Setting {
    fn change((path, value): (&'static str, &str)) -> Self {
        let text = fs::read_to_string(path).ok();
        // Of several choices the one in brackets is taken.
        let chosen = |text: &String| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned());
        let before = text.map(|text| chosen(&text).unwrap_or(text));
        let _ = fs::write(path, value);
        Self { path, before }
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = fs::write(self.path, before);
        }
    }
}

/// What was read of a service.
struct Rescue {
    pid: i32,
    summary: Summary,
    /// Pages that are not in the images.
    later: Later,
    seconds: f64,
}

/// Reads the service and writes images of it. The active must stand still: nobody here looks whether it does.
fn read(known: Option<&Kernel>, pid: i32, registers: &str, strict: bool) -> Result<Rescue> {
    let start = Instant::now();
    let images = Path::new(IMAGES);
    let _ = fs::remove_dir_all(images);
    let frozen = criu::Frozen::parse(registers);
    if strict
        && let (Ok(needs), Some(has)) = (criu::weigh(known.context("not armed")?, pid), available())
        && needs > has
    {
        bail!("it takes {} MiB to rebuild it, and the backup has {}", needs.div_ceil(MIB), has / MIB);
    }
    let mut later = Later::default();
    let (summary, losses) = criu::write(
        known.context("not armed")?,
        &frozen,
        pid,
        images,
        later::is_possible().then_some(&mut later),
    )?;
    if strict && !losses.is_empty() {
        bail!("not all of it can be carried over: {}", losses.join("; "));
    }
    Ok(Rescue { pid, summary, later, seconds: start.elapsed().as_secs_f64() })
}

/// Rebuilds the service. The active must be dead: its disk is written to here.
fn rebuild(known: Option<&Arc<Kernel>>, rescue: Option<Rescue>) -> Result<(i32, Report)> {
    let kernel = known.context("not armed")?;
    let rescue = rescue.context("the service has not been read")?;
    let mut summary = rescue.summary;
    let mut steps = vec![Step { name: "images".to_owned(), seconds: rescue.seconds }];
    let mut last = Instant::now();
    let mut step = |name| {
        steps.push(Step { name: str::to_owned(name), seconds: last.elapsed().as_secs_f64() });
        last = Instant::now();
    };
    if let Some(place) = disk::place() {
        // It is being plugged in meanwhile.
        let device = disk::mount(&place, PLUGGED)?;
        step("disk");
        let written = writeback::write_back(kernel, &device, &place, Path::new(IMAGES))?;
        summary.remarks.extend(written.remarks);
        summary.written = Some(written.counts);
        step("write-back");
    }
    summary.tmpfs = Some(elsewhere::carry_over(&kernel.process(rescue.pid)?, &mut summary.remarks));
    summary.remarks.extend(Ipc::read(Path::new(IMAGES))?.restore());
    match Network::kept() {
        Ok(network) => summary.remarks.extend(network.iter().flat_map(Network::put_addresses_back)),
        Err(error) => summary.remarks.push(format!("{error:#}")),
    }
    step("elsewhere");
    let argv = ["criu", "restore", "--images-dir", IMAGES, "--work-dir", WORK, "--log-file", "restore.log"];
    let more = [
        "-v4",
        "--restore-detached",
        "--tcp-established",
        "--manage-cgroups=ignore",
        "--skip-in-flight",
        "--file-locks",
    ];
    let after = After::read(Path::new(IMAGES))?;
    let still = if after.must_stop() { &["--leave-stopped"][..] } else { &[] };
    let hook = ["--action-script", HOOK];
    // What has been restored is freed at once: both together would not fit where a service has half of the memory.
    let dedup: &[&str] =
        if summary.pages - summary.lazy_pages > MANY_PAGES { &["--auto-dedup"] } else { &[] };
    let lazy: &[&str] = if summary.lazy_pages > 0 { &["--lazy-pages"] } else { &[] };
    let argv = argv.iter().chain(&more).chain(still).chain(&hook).chain(dedup).chain(lazy);
    let argv: Vec<String> = argv.map(|&word| word.to_owned()).collect();
    let begin = online::now();
    let _settings = [Setting::change(OVERCOMMIT), Setting::change(NO_LARGE_PAGES)];
    // Opened when the service comes onto the network.
    let closed = loopback::close();
    if let Err(error) = &closed {
        summary.remarks.push(format!("connections of the service with itself may be lost: {error:#}"));
    }
    let borrowed = Borrowed::for_sockets_in(Path::new(IMAGES));
    if let Err(error) = &borrowed {
        summary.remarks.push(format!("{error:#}"));
    }
    let source: Arc<dyn Source> = Arc::<Kernel>::clone(kernel);
    let listening =
        if summary.lazy_pages > 0 { Some(rescue.later.listen(source, Path::new(WORK))?) } else { None };
    let mut bringing = None;
    // The nest is forked off while there is one thread; criu waits for its first answer until there are two.
    let started = nest::start(&nest::Job::Helper(&argv), || {
        bringing = listening.map(|listening| listening.begin(Box::new(tell)));
    });
    let nest = match started {
        Ok(nest) => nest,
        Err(error) => {
            if let Some(bringing) = bringing {
                bringing.give_up();
            }
            let log = fs::read_to_string("/run/orrery/restore.log").unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let first = lines.iter().position(|line| line.contains("Error")).unwrap_or(lines.len());
            // What led to the first error, and all that came of it.
            bail!("{error:#}\n{}{}", lines[first.saturating_sub(8)..].join("\n"), shortage());
        }
    };
    drop(borrowed);
    if let Some(bringing) = bringing {
        bringing.go_on(nest)?;
    }
    let (pid, _) = nest::service(nest).context("the service ended at once")?;
    summary.remarks.extend(after.apply(nest));
    let online = online::report().context("the service never came onto the network")?;
    let seconds = |from: Duration, to: Duration| to.saturating_sub(from).as_secs_f64();
    steps.push(Step { name: "restore".to_owned(), seconds: seconds(begin, online.from) });
    steps.push(Step { name: "network".to_owned(), seconds: seconds(online.from, online.to) });
    steps.push(Step { name: "resume".to_owned(), seconds: seconds(online.to, online::now()) });
    summary.remarks.extend(online.remarks);
    Ok((nest, Report::Restored { pid, steps, summary }))
}

/// Tells the host something by the way.
fn tell(report: &Report) {
    if let Err(error) = Control::open().and_then(|mut control| control.send(report)) {
        eprintln!("orrery-guest: cannot send a report to the host: {error:#}");
    }
}

/// Bytes of memory that can be had, by proc_meminfo(5).
fn available() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// What the kernel has said about memory that ran out, and where it is; nothing if it did not.
fn shortage() -> String {
    let log = setup::output(&["busybox", "dmesg"]).map(|(_, log)| log).unwrap_or_default();
    let ran_out = ["invoked oom-killer", "Out of memory"];
    let said: String = log
        .lines()
        .filter(|line| ran_out.iter().any(|words| line.contains(words)))
        .map(|line| format!("\nkernel: {line}"))
        .collect();
    if said.is_empty() {
        return said;
    }
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let telling = ["MemTotal", "MemAvailable", "AnonPages", "Shmem:", "SUnreclaim"];
    let now = memory.lines().filter(|line| telling.iter().any(|name| line.starts_with(name)));
    said + &now
        .map(|line| format!("\n{}", line.split_whitespace().collect::<Vec<_>>().join(" ")))
        .collect::<String>()
}
