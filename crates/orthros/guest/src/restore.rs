//! The restore of a service from the dead active's memory: what happens before criu, while it runs, and after.

mod criu_log;
pub(crate) mod ipc;
pub(crate) mod open_files;
pub(crate) mod post_restore;
pub(crate) mod pre_resume;
pub(crate) mod temporary_addresses;
pub(crate) mod tmpfs;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use orrery_kimage::Kernel;
use orrery_orthros_images::{CpuRegisters, Exclusions, RestoreState};
use orrery_orthros_wire::{Report, Step, Summary};

use crate::control::Control;
use crate::lazy_pages::{LazyPages, PageServer, PageSource};
use crate::network::configuration::NetworkConfiguration;
use crate::network::loopback;
use crate::{command, disk, lazy_pages, pidns, writeback};
use temporary_addresses::TemporaryAddresses;

/// How long the dead guest's disk may take to appear.
const PLUG_TIMEOUT: Duration = Duration::from_secs(10);
const IMAGES: &str = "/run/orrery/images";
/// How often criu is run: each time but the first without what it could not restore before.
const MAX_ATTEMPTS: usize = 8;
/// The directory that criu works in.
const WORK: &str = "/run/orrery";
/// The program of the image that criu runs at each stage: it starts this program at the one that matters.
const HOOK: &str = "/etc/orrery/hook";
const MIB: u64 = 1 << 20;
/// From 64 MiB on, free memory matters more than the time that freeing takes.
const MANY_PAGES: u64 = 16 << 10;

/// Lets more be mapped than there is memory, proc_sys_vm(5): criu makes each mapping writable first, of which the kernel
/// counts all against its memory, also what a service has reserved and never used (MariaDB: 8 TiB).
const OVERCOMMIT: (&str, &str) = ("/proc/sys/vm/overcommit_memory", "1");
/// Disables huge pages while criu fills mappings: one would be there, of zeros, also where pages arrive later.
const NO_HUGE_PAGES: (&str, &str) = ("/sys/kernel/mm/transparent_hugepage/enabled", "never");

/// A setting of the kernel that has another value until this is dropped.
struct TemporarySetting {
    path: &'static str,
    before: Option<String>,
}

impl TemporarySetting {
    fn set((path, value): (&'static str, &str)) -> Self {
        let text = fs::read_to_string(path).ok();
        // Of several choices the current one is in brackets.
        let chosen = |text: &String| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned());
        let before = text.map(|text| chosen(&text).unwrap_or(text));
        let _ = fs::write(path, value);
        Self { path, before }
    }
}

impl Drop for TemporarySetting {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = fs::write(self.path, before);
        }
    }
}

/// A service whose images are written.
pub(crate) struct Images {
    /// The PID of the service in the dead guest.
    pid: i32,
    /// The registers of the dead guest's processors, as QEMU's monitor prints them.
    registers: String,
    /// What is not restored, because criu has failed with it.
    exclusions: Exclusions,
    summary: Summary,
    lazy: LazyPages,
    seconds: f64,
}

/// Reads the service and writes images of it. The active must be paused: nobody here checks that it is.
pub(crate) fn write_images(kernel: &Kernel, pid: i32, registers: &str, strict: bool) -> Result<Images> {
    if strict
        && let (Ok(required), Some(available)) =
            (orrery_orthros_images::estimate_memory(kernel, pid), available_memory())
        && required > available
    {
        bail!(
            "cannot restore the service: that takes {} MiB, and the backup has {}",
            required.div_ceil(MIB),
            available / MIB
        );
    }
    write_images_without(kernel, pid, registers.to_owned(), Exclusions::default(), strict)
}

/// Reads the service and writes images of it, but for what is excluded.
fn write_images_without(
    kernel: &Kernel,
    pid: i32,
    registers: String,
    exclusions: Exclusions,
    strict: bool,
) -> Result<Images> {
    let start = Instant::now();
    let directory = Path::new(IMAGES);
    let _ = fs::remove_dir_all(directory);
    let cpus = CpuRegisters::parse(&registers);
    let lazy = lazy_pages::are_possible();
    let service = orrery_orthros_images::read_service(kernel, &cpus, pid, lazy, &exclusions)?;
    if strict && !service.losses().is_empty() {
        bail!("cannot carry over all of the service: {}", service.losses().join("; "));
    }
    orrery_orthros_images::write(&orrery_orthros_images::encode(&service)?, kernel, directory)?;
    let lazy = LazyPages::new(service.lazy_pages());
    let (summary, seconds) = (service.summary(), start.elapsed().as_secs_f64());
    Ok(Images { pid, registers, exclusions, summary, lazy, seconds })
}

/// Removes the images, which take memory that the service may want.
pub(crate) fn remove_images() {
    let _ = fs::remove_dir_all(IMAGES);
}

/// Restores the service. The active must be dead: its disk is written to here. Returns the init process of the service's PID
/// namespace, and the report for the host.
///
/// If criu fails, what it could not restore is left out, and it begins again: a file descriptor is hung up, a process counts as killed.
pub(crate) fn restore(kernel: &Arc<Kernel>, mut images: Images) -> Result<(i32, Report)> {
    let mut remarks = Vec::new();
    let mut steps = vec![Step { name: "images".to_owned(), seconds: images.seconds }];
    let mut last = Instant::now();
    let mut step = |name: &str| {
        steps.push(Step { name: name.to_owned(), seconds: last.elapsed().as_secs_f64() });
        last = Instant::now();
    };
    let state = RestoreState::load(Path::new(IMAGES))?;
    let mut written_back = None;
    if let Some(mount_point) = disk::mount_point() {
        // It is being plugged in meanwhile.
        let device = disk::mount(&mount_point, PLUG_TIMEOUT)?;
        step("disk");
        let written =
            writeback::write_back(kernel, &device, &mount_point, &state.unnamed_files, Path::new(IMAGES))?;
        remarks.extend(written.remarks);
        written_back = Some(written.counts);
        step("write-back");
    }
    let tmpfs = tmpfs::restore(&kernel.process(images.pid)?, &mut remarks);
    remarks.extend(ipc::restore(&state));
    if let Some((host, domain)) = &state.names {
        let named = rustix::system::sethostname(host.as_bytes())
            .and_then(|()| rustix::system::setdomainname(domain.as_bytes()));
        if let Err(error) = named {
            remarks.push(format!("the host name {host} is lost: {error}"));
        }
    }
    match NetworkConfiguration::load() {
        Ok(network) => remarks.extend(network.iter().flat_map(NetworkConfiguration::restore_addresses)),
        Err(error) => remarks.push(format!("{error:#}")),
    }
    step("tmpfs");
    let begin = pre_resume::now();
    let _settings = [TemporarySetting::set(OVERCOMMIT), TemporarySetting::set(NO_HUGE_PAGES)];
    // Opened when the service comes onto the network.
    let closed = loopback::close();
    if let Err(error) = &closed {
        remarks.push(format!("connections of the service with itself may be lost: {error:#}"));
    }
    let mut attempts = 1;
    let (init, server, state) = loop {
        let state = RestoreState::load(Path::new(IMAGES))?;
        let error = match run_criu(kernel, &mut images, &state, &mut remarks) {
            Ok((init, server)) => break (init, server, state),
            Err(error) => error,
        };
        // What was put into images from the disk is not there a second time; and a service that was on the network has acted.
        let is_repeatable = state.unnamed_files.is_empty() && !pre_resume::has_begun();
        let without = if is_repeatable && attempts < MAX_ATTEMPTS { images.without_culprit() } else { None };
        let Some(exclusions) = without else { return Err(error) };
        attempts += 1;
        images = write_images_without(kernel, images.pid, images.registers, exclusions, false)
            .map_err(|second| error.context(format!("{second:#}")))?;
    };
    let mut summary = images.summary;
    summary.remarks.append(&mut remarks);
    (summary.written, summary.tmpfs) = (written_back, Some(tmpfs));
    if let Some(server) = server {
        server.push_remaining(init)?;
    }
    let (pid, _) = pidns::service(init).context("the service ended at once")?;
    summary.remarks.extend(post_restore::complete(&state, init));
    let online = pre_resume::outcome().context("the service never came onto the network")?;
    let seconds = |from: Duration, to: Duration| to.saturating_sub(from).as_secs_f64();
    for (name, from, to) in [
        ("restore", begin, online.from),
        ("network", online.from, online.to),
        ("resume", online.to, pre_resume::now()),
    ] {
        steps.push(Step { name: name.to_owned(), seconds: seconds(from, to) });
    }
    summary.remarks.extend(online.remarks);
    Ok((init, Report::Restored { pid, steps, summary }))
}

/// Runs criu on the images. Returns the init process of the PID namespace in which the service is, and what serves its pages.
fn run_criu(
    kernel: &Arc<Kernel>,
    images: &mut Images,
    state: &RestoreState,
    remarks: &mut Vec<String>,
) -> Result<(i32, Option<PageServer>)> {
    let argv = criu_command(&images.summary, state);
    let _ = fs::remove_file(log_of_criu());
    let addresses = TemporaryAddresses::add(&state.local_addresses);
    if let Err(error) = &addresses {
        remarks.push(format!("{error:#}"));
    }
    let source: Arc<dyn PageSource> = Arc::<Kernel>::clone(kernel);
    let lazy = std::mem::take(&mut images.lazy);
    let listener =
        if images.summary.lazy_pages > 0 { Some(lazy.listen(source, Path::new(WORK))?) } else { None };
    let mut server: Option<PageServer> = None;
    // The namespace is made while this process has one thread; criu waits for the page server's first answer until it has two.
    let started = pidns::start(&pidns::Job::Restore(&argv, state.exited_leaders, state.output_pipe), || {
        server = listener.map(|listener| listener.start(Box::new(send)));
    });
    match started {
        Ok(init) => Ok((init, server)),
        Err(error) => {
            if let Some(server) = server {
                server.abandon();
            }
            let errors = criu_log::Errors::read(&log_of_criu()).describe();
            bail!("{error:#}\n{errors}{}", memory_shortage())
        }
    }
}

impl Images {
    /// Returns what is excluded from the next attempt: what criu's first error is about, besides what was excluded before. `None` if the log
    /// names nothing that can be left out: the service's first process is needed.
    fn without_culprit(&self) -> Option<Exclusions> {
        let errors = criu_log::Errors::read(&log_of_criu());
        let criu_log::Culprit { pid, fd } = errors.culprit()?;
        let why = format!("criu cannot restore it: {}", errors.describe().lines().next().unwrap_or_default());
        let mut exclusions = self.exclusions.clone();
        if let Some(fd) = fd
            && !exclusions.descriptors.contains_key(&(pid, fd))
        {
            exclusions.descriptors.insert((pid, fd), why);
        } else if exclusions.processes.insert(pid, why).is_some() {
            return None;
        }
        Some(exclusions)
    }
}

fn criu_command(summary: &Summary, state: &RestoreState) -> Vec<String> {
    let mut argv =
        vec!["criu", "restore", "--images-dir", IMAGES, "--work-dir", WORK, "--log-file", "restore.log"];
    argv.extend([
        "-v4",
        "--restore-detached",
        "--tcp-established",
        "--manage-cgroups=ignore",
        "--skip-in-flight",
    ]);
    argv.extend(["--file-locks", "--action-script", HOOK]);
    if post_restore::must_stop(state) {
        argv.push("--leave-stopped");
    }
    // What has been restored is freed at once: both together would not fit where a service has half of the memory.
    if summary.pages - summary.lazy_pages > MANY_PAGES {
        argv.push("--auto-dedup");
    }
    if summary.lazy_pages > 0 {
        argv.push("--lazy-pages");
    }
    argv.into_iter().map(str::to_owned).collect()
}

fn log_of_criu() -> PathBuf {
    PathBuf::from(WORK).join("restore.log")
}

/// Sends a report to the host that is not the answer to a request.
fn send(report: &Report) {
    if let Err(error) = Control::open().and_then(|mut control| control.send(report)) {
        eprintln!("orrery-guest: cannot send a report to the host: {error:#}");
    }
}

/// Returns the bytes of available memory, by proc_meminfo(5).
pub(crate) fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
}

/// Returns what the kernel has logged about memory that ran out, and what uses it; nothing if it did not.
fn memory_shortage() -> String {
    let log = command::output(&["busybox", "dmesg"]).map(|(_, log)| log).unwrap_or_default();
    let ran_out = ["invoked oom-killer", "Out of memory"];
    let logged: String = log
        .lines()
        .filter(|line| ran_out.iter().any(|words| line.contains(words)))
        .map(|line| format!("\nkernel: {line}"))
        .collect();
    if logged.is_empty() {
        return logged;
    }
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let names = ["MemTotal", "MemAvailable", "AnonPages", "Shmem:", "SUnreclaim"];
    let now = memory.lines().filter(|line| names.iter().any(|name| line.starts_with(name)));
    let now = now.map(|line| format!("\n{}", line.split_whitespace().collect::<Vec<_>>().join(" ")));
    logged + &now.collect::<String>()
}
