//! Copies of a program from file trees of their own, as containers would have them, and what may reduce their memory: a
//! store of `orrery orc`, KSM.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use orrery_orc_client::Client;
use orrery_orc_store::measure::{mappings, measure};
use tempfile::TempDir;

use crate::contender::Skipped;
use crate::machine;

/// `PR_SET_MEMORY_MERGE` in prctl(2), Linux 6.4: all anonymous memory of this process and those it starts is KSM's.
const SET_MEMORY_MERGE: libc::c_int = 67;
const KSM: &str = "/sys/kernel/mm/ksm";

/// A child that is ended with this object.
#[derive(Debug)]
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.0.id()) {
            // SAFETY: a signal to a child of ours that was not waited for.
            unsafe { libc::kill(pid, libc::SIGTERM) };
        }
        let _ = self.0.wait();
    }
}

/// Has a command asked to end when the thread that starts it does, also where that is killed: what a store has made stays otherwise,
/// and nobody may remove it.
pub fn terminate_with_parent(command: &mut Command) {
    let signal = Some(rustix::process::Signal::TERM);
    // SAFETY: one system call between fork and exec.
    unsafe {
        command.pre_exec(move || Ok(rustix::process::set_parent_process_death_signal(signal)?));
    }
}

impl Running {
    /// Starts a program and waits until it writes a line that begins with `ready`.
    pub fn start(command: &mut Command, ready: &str) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        terminate_with_parent(command);
        let mut child = Self(command.spawn().with_context(|| format!("cannot start {command:?}"))?);
        let mut lines = BufReader::new(child.0.stdout.take().context("no output")?).lines();
        while let Some(line) = lines.next().transpose()? {
            if line.starts_with(ready) {
                // The rest of its output is read and dropped.
                std::thread::spawn(move || lines.for_each(drop));
                return Ok(child);
            }
        }
        bail!("{command:?} ended without {ready:?}")
    }

    /// Returns the PID.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap_or(0)
    }
}

/// A store that is ended with this object.
#[derive(Debug)]
pub struct Store {
    _server: Running,
    /// Where it is. The host's secret, which it makes beside that, goes with the directory around both.
    place: PathBuf,
    _directory: TempDir,
}

impl Store {
    /// Starts a store whose objects are in memory, or on disk where they are large.
    pub fn start(on_disk: bool) -> Result<Self> {
        let disk = machine::program_directory()?;
        if on_disk { Self::with(&["--disk", &disk.to_string_lossy()]) } else { Self::with(&[]) }
    }

    /// Starts a store with these options.
    pub fn with(options: &[&str]) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let mut command = Command::new(machine::program_directory()?.join("orrery"));
        let place = directory.path().join("store");
        command.args(["orc", "serve", "--directory"]).arg(&place).stdin(Stdio::null());
        command.args(options);
        terminate_with_parent(&mut command);
        let server = Running(command.spawn().context("cannot start the store")?);
        let store = Self { _server: server, place, _directory: directory };
        let begin = Instant::now();
        while Client::connect_to(&store.place).is_err() {
            ensure!(begin.elapsed() < Duration::from_secs(30), "the store does not answer");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(store)
    }

    /// Makes a command share through this store, as `orrery orc run` does it.
    pub fn share(&self, command: &mut Command) -> Result<()> {
        let auditor = orrery_orc_auditor::find(&self.place).context("cannot find the auditor")?;
        command.env("ORRERY_ORC", &self.place).env("LD_AUDIT", auditor);
        command.env("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=16384");
        Ok(())
    }

    /// Returns the bytes of memory of its objects.
    pub fn bytes(&self) -> Result<u64> {
        let measured = measure(&Client::connect_to(&self.place)?.report()?)?;
        Ok(measured.trust_domains.values().map(|saving| saving.stored).sum())
    }
}

/// KSM with other settings until this object is dropped, or a signal ends the program: then its settings are restored.
#[derive(Debug)]
pub struct Ksm(());

/// The settings to restore.
static SETTINGS_BEFORE: Mutex<Vec<(&'static str, String)>> = Mutex::new(Vec::new());

fn restore_settings() {
    for (name, value) in SETTINGS_BEFORE.lock().unwrap_or_else(PoisonError::into_inner).drain(..).rev() {
        let _ = fs::write(format!("{KSM}/{name}"), value.trim());
    }
}

impl Ksm {
    /// Makes it scan `pages` pages every `pause` milliseconds.
    ///
    /// # Errors
    /// [`Skipped`] where the kernel has none, or it is not ours to set.
    pub fn at_work(pages: u32, pause: u32) -> Result<Self> {
        static LISTEN: Once = Once::new();
        LISTEN.call_once(|| {
            // Where there is another handler already, a signal leaves KSM as it is set.
            let _ = ctrlc::set_handler(|| {
                restore_settings();
                std::process::exit(130);
            });
        });
        let wanted = [("pages_to_scan", pages), ("sleep_millisecs", pause), ("run", 1)];
        let this = Self(());
        for (name, value) in wanted {
            let path = format!("{KSM}/{name}");
            let set = fs::read_to_string(&path).and_then(|before| {
                SETTINGS_BEFORE.lock().unwrap_or_else(PoisonError::into_inner).push((name, before));
                fs::write(&path, value.to_string())
            });
            set.map_err(|error| Skipped(format!("KSM cannot be set up here: {path}: {error}")))?;
        }
        Ok(this)
    }

    /// Registers the memory of a command, and of what it starts.
    pub fn merge(command: &mut Command) {
        // SAFETY: one system call between fork and exec.
        unsafe {
            command.pre_exec(|| match libc::prctl(SET_MEMORY_MERGE, 1, 0, 0, 0) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
    }
}

impl Drop for Ksm {
    fn drop(&mut self) {
        restore_settings();
    }
}

/// KSM as [ksmtuned(1)](https://manpages.debian.org/ksmtuned) sets it, and as the paper's experiment has it: it looks each minute, scans only
/// where less than a fifth of the memory is free, and then more from minute to minute.
#[derive(Debug)]
pub struct TunedKsm {
    _ksm: Ksm,
    looked: Instant,
    pages: u32,
}

impl TunedKsm {
    /// From one look to the next (`KSM_MONITOR_INTERVAL`).
    const INTERVAL: Duration = Duration::from_secs(60);
    /// The share of free memory below which it scans (`KSM_THRES_COEF`).
    const THRESHOLD: f64 = 0.2;
    /// Pages per scan at least, at most, and how many more or fewer after each look (`KSM_NPAGES_MIN`, `_MAX`, `_BOOST`, `_DECAY`).
    const PAGES: (u32, u32, u32, u32) = (64, 1250, 300, 50);

    /// Takes KSM, which does not scan before the first look.
    ///
    /// # Errors
    /// [`Skipped`] where the kernel has none, or it is not ours to set.
    pub fn new() -> Result<Self> {
        // 10 ms (`KSM_SLEEP_MSEC`) are for a machine of 16 GiB, and at least.
        let ksm = Ksm::at_work(Self::PAGES.0, 10)?;
        let tuned = Self { _ksm: ksm, looked: Instant::now(), pages: Self::PAGES.0 };
        tuned.set("run", 0)?;
        Ok(tuned)
    }

    fn set(&self, name: &str, value: u32) -> Result<()> {
        let path = format!("{KSM}/{name}");
        fs::write(&path, value.to_string()).with_context(|| format!("cannot write {path}"))
    }

    /// Looks at which share of the memory is free, if it is time for that.
    ///
    /// # Errors
    /// KSM cannot be set.
    pub fn look(&mut self, free: f64) -> Result<()> {
        if self.looked.elapsed() < Self::INTERVAL {
            return Ok(());
        }
        self.looked = Instant::now();
        let scans = free < Self::THRESHOLD;
        self.pages = Self::pages_after(self.pages, scans);
        self.set("pages_to_scan", self.pages)?;
        self.set("run", u32::from(scans))
    }

    fn pages_after(pages: u32, scans: bool) -> u32 {
        let (least, most, more, fewer) = Self::PAGES;
        let pages = if scans { pages + more } else { pages.saturating_sub(fewer) };
        pages.clamp(least, most)
    }
}

/// Returns every file whose code a running program maps, except for the loader, whose path is part of the program.
pub fn files_of(pid: i32) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = mappings(pid)?
        .into_iter()
        .filter(|area| {
            area.access == "r-xp" && area.name.starts_with('/') && !area.name.contains("/ld-linux")
        })
        .map(|area| area.name.into())
        .collect();
    files.sort();
    files.dedup();
    ensure!(files.len() > 1, "the program maps {} files only", files.len());
    Ok(files)
}

/// Returns the path in the tree of the copy of `file`.
pub fn copy_in_tree(tree: &Path, file: &Path) -> PathBuf {
    tree.join(file.file_name().unwrap_or(file.as_os_str()))
}

/// Creates a tree with files of its own, or with links to those of another.
pub fn create_tree(tree: &Path, files: &[PathBuf], link_to: Option<&Path>) -> Result<()> {
    fs::create_dir_all(tree)?;
    for file in files {
        let to = copy_in_tree(tree, file);
        match link_to {
            Some(other) => fs::hard_link(copy_in_tree(other, file), &to),
            None => fs::copy(file, &to).map(|_| ()),
        }
        .with_context(|| format!("cannot plant {}", to.display()))?;
    }
    Ok(())
}

fn entries(trees: &[PathBuf]) -> impl Iterator<Item = PathBuf> {
    trees.iter().flat_map(fs::read_dir).flatten().flatten().map(|entry| entry.path())
}

/// Returns the regular files in directories and all that is below them.
fn files_below(directories: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let (mut waiting, mut files) = (directories.to_vec(), Vec::new());
    while let Some(next) = waiting.pop() {
        for entry in fs::read_dir(&next).with_context(|| format!("cannot list {}", next.display()))? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                waiting.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    Ok(files)
}

/// Drops the cached pages of the trees' files.
pub fn drop_caches(trees: &[PathBuf]) -> Result<()> {
    drop_pages(trees, entries(trees))
}

/// Drops the cached pages of all files below these directories.
pub fn drop_caches_below(directories: &[PathBuf]) -> Result<()> {
    drop_pages(directories, files_below(directories)?.into_iter())
}

fn drop_pages(directories: &[PathBuf], files: impl Iterator<Item = PathBuf>) -> Result<()> {
    // Only what is on the disk can go. All at once: one by one takes a write of the journal each.
    if let Some(first) = directories.first() {
        rustix::fs::syncfs(File::open(first)?)
            .with_context(|| format!("cannot write {} out", first.display()))?;
    }
    for path in files {
        let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        // SAFETY: advice about a file of ours.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    }
    Ok(())
}

/// Returns the cached bytes of the trees' files, each file once, mapped or not (mincore(2)).
pub fn cached(trees: &[PathBuf]) -> Result<u64> {
    cached_pages(entries(trees))
}

/// Returns the cached bytes of all files below these directories, as [`cached`] does.
pub fn cached_below(directories: &[PathBuf]) -> Result<u64> {
    cached_pages(files_below(directories)?.into_iter())
}

fn cached_pages(files: impl Iterator<Item = PathBuf>) -> Result<u64> {
    let mut seen = HashSet::new();
    let mut pages = 0_u64;
    for path in files {
        let file = File::open(&path)?;
        let found = file.metadata()?;
        if found.len() == 0 || !seen.insert(found.ino()) {
            continue;
        }
        let length = usize::try_from(found.len())?;
        let mut present = vec![0_u8; length.div_ceil(4096)];
        // SAFETY: a mapping of its own, asked about and unmapped again, never read.
        let asked = unsafe {
            let place = libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            );
            ensure!(place != libc::MAP_FAILED, "map {}", path.display());
            let asked = libc::mincore(place, length, present.as_mut_ptr());
            libc::munmap(place, length);
            asked
        };
        ensure!(asked == 0, "mincore: {}", std::io::Error::last_os_error());
        pages += present.iter().map(|page| u64::from(page & 1)).sum::<u64>();
    }
    Ok(pages * 4096)
}

/// Returns the bytes of anonymous memory of a process, with shared pages divided among the processes.
pub fn anonymous(pid: i32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss_Anon:")).context("no Pss_Anon")?;
    let kib: u64 = line.split_whitespace().next().context("no number")?.parse()?;
    Ok(kib << 10)
}

/// Returns the seconds of CPU time of a process (utime and stime in proc_pid_stat(5)).
pub fn processor_time(pid: i32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let mut fields = text.rsplit(')').next().context("no fields")?.split_whitespace().skip(11);
    let mut ticks = || -> Result<u32> { Ok(fields.next().context("too few fields")?.parse()?) };
    let ticks = f64::from(ticks()? + ticks()?);
    Ok(ticks / f64::from(u32::try_from(rustix::param::clock_ticks_per_second())?))
}

/// Returns the bytes of relocated read-only data that are private to a process.
pub fn relocated(pid: i32) -> Result<u64> {
    let read_only = |area: &orrery_orc_store::measure::MappingUsage| {
        area.access.starts_with("r-") && (area.name.starts_with('/') || area.is_object())
    };
    Ok(mappings(pid)?.iter().filter(|area| read_only(area)).map(|area| area.anonymous).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tuned_scans_grow_with_the_lack_of_memory() {
        let scarce = |pages| TunedKsm::pages_after(pages, true);
        assert_eq!([scarce(64), scarce(364), scarce(1200), scarce(1250)], [364, 664, 1250, 1250]);
        assert_eq!([TunedKsm::pages_after(364, false), TunedKsm::pages_after(70, false)], [314, 64]);
    }
}
