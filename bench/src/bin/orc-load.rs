//! `make bench B=orc-load`: starting a program that shares its code, and loading a library.
//!
//! Warm: the store knows the files, and the kernel has them cached where they are not shared. A program that does nothing
//! shows the fixed cost, real ones (Python with libraries, Redis, nginx, git) what users notice, a dlopen(3) what a library
//! costs: one that is found by its name, and plug-ins in C++ that are loaded by their paths, small ones, which are left alone, and
//! larger ones, which are shared; of these the CPU time is measured that the calls take. The floor is an auditor of the loader (rtld-audit(7)) that does nothing: less than that no program can start in
//! that is audited at all. What would take its place, a preloaded object (`LD_PRELOAD`), is measured empty, too.
//!
//! Ours meets one rival at a time. All others start from the same files: side by side each would find the processor's caches warm
//! from the others, and ours only from itself.
//!
//! Cold: program or library come from a tree that nobody has seen, whose files are on disk and not cached; the store has the
//! same bytes from another tree.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use orrery_bench::copies::{Running, Store, copy_in_tree, create_tree, drop_caches, files_of};
use orrery_bench::plugins::Plugins;
use orrery_bench::resp::redis_program;
use orrery_bench::{Bench, Case, Contender, Entry, Group, Quantity, Sample, Skipped, Unit, machine};
use tempfile::TempDir;

const PYTHON: &str = "/usr/bin/python3";
const LIBRARIES: &str = "import ssl, sqlite3, json, ctypes, decimal";
/// Loads the library of this name or path, and prints how many nanoseconds that took.
const DLOPEN: &str = "import ctypes, sys, time; begin = time.perf_counter_ns(); \
                      ctypes.CDLL(sys.argv[1]); print(time.perf_counter_ns() - begin)";
const LIBRARY: &str = "libcrypto.so.3";
/// How many plug-ins are loaded one after the other, of the small and the large ones.
const MANY: (usize, usize) = (300, 100);

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Plain,
    Floor,
    Preload,
    Ours,
}

impl Way {
    /// Returns the environment variable that makes the loader load an object of the benchmark's own, and its source.
    fn object(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Plain | Self::Ours => None,
            Self::Floor => Some(("LD_AUDIT", "unsigned la_version(unsigned version) { return version; }")),
            Self::Preload => Some(("LD_PRELOAD", "")),
        }
    }
}

/// Starts programs, with a store or without.
struct Starts {
    store: Option<Store>,
    /// The object that does nothing, and the environment variable that makes the loader load it.
    idle: Option<(&'static str, PathBuf)>,
    /// What Python with its libraries is made of.
    files: Vec<PathBuf>,
    /// For nginx's settings and logs, and the plug-ins.
    directory: TempDir,
    plugins: Option<Plugins>,
}

/// The smallest configuration that nginx accepts.
const NGINX: &str =
    "error_log stderr; pid DIRECTORY/pid; events {} http { access_log off; server { listen 127.0.0.1:1; } }";

fn build_idle(directory: &Path, text: &str) -> Result<PathBuf> {
    let (source, idle) = (directory.join("idle.c"), directory.join("idle.so"));
    std::fs::write(&source, text)?;
    let mut command = Command::new("cc");
    command.args(["-O2", "-fPIC", "-shared", "-nostdlib", "-o"]).arg(&idle).arg(&source);
    let status = command.status().map_err(|error| Skipped(format!("there is no compiler: {error}")))?;
    ensure!(status.success(), "{command:?} failed");
    Ok(idle)
}

/// Makes a directory tree with copies of these files that no process has seen, on disk only.
fn unseen(files: &[PathBuf]) -> Result<TempDir> {
    // Not in /tmp, which may be memory itself.
    let directory = tempfile::tempdir_in(machine::program_directory()?)?;
    create_tree(directory.path(), files, None)?;
    drop_caches(&[directory.path().to_owned()])?;
    Ok(directory)
}

impl Starts {
    fn new(way: Way) -> Result<Self> {
        let mut command = Command::new(PYTHON);
        command.args(["-c", &format!("{LIBRARIES}; print('ready', flush=True); input()")]);
        let running = Running::start(&mut command, "ready")
            .map_err(|error| Skipped(format!("{PYTHON} cannot load what it should: {error:#}")))?;
        let files = files_of(running.pid())?;
        let store = if way == Way::Ours { Some(Store::start(false)?) } else { None };
        let directory = tempfile::tempdir()?;
        let idle = match way.object() {
            Some((variable, source)) => Some((variable, build_idle(directory.path(), source)?)),
            None => None,
        };
        let settings = NGINX.replace("DIRECTORY", &directory.path().display().to_string());
        std::fs::write(directory.path().join("nginx.conf"), settings)?;
        Ok(Self { store, idle, files, directory, plugins: None })
    }

    /// Runs the command, and returns how long that took, and its output.
    fn timed(&self, command: &mut Command) -> Result<(Duration, String)> {
        if let Some(store) = &self.store {
            store.share(command)?;
        }
        if let Some((variable, object)) = &self.idle {
            command.env(variable, object).env("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=16384");
        }
        let begin = Instant::now();
        let output = command.stdin(Stdio::null()).output();
        let elapsed = begin.elapsed();
        let name = command.get_program().to_string_lossy().into_owned();
        let output = output.map_err(|error| Skipped(format!("{name} cannot be started: {error}")))?;
        ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
        Ok((elapsed, String::from_utf8(output.stdout)?))
    }

    fn run(&self, command: &mut Command) -> Result<Duration> {
        self.timed(command).map(|(elapsed, _)| elapsed)
    }

    /// Returns how long a library took to load, as the program measured it.
    fn dlopen(&self, library: &OsStr) -> Result<Duration> {
        let (_, output) = self.timed(Command::new(PYTHON).args(["-c", DLOPEN]).arg(library))?;
        Ok(Duration::from_nanos(output.trim().parse().context("a number of nanoseconds")?))
    }

    /// Returns how long it took to load some plug-ins.
    fn load_plugins(&mut self, is_large: bool, is_one: bool) -> Result<Duration> {
        if self.plugins.is_none() {
            self.plugins = Some(Plugins::build(self.directory.path(), MANY.0, MANY.1)?);
        }
        let count = if is_one { 1 } else { MANY.0 };
        let command = self.plugins.as_ref().map(|plugins| plugins.command(is_large, count));
        let (_, output) = self.timed(&mut command.context("no plug-ins")?)?;
        Plugins::took(&output)
    }

    fn cold_dlopen(&self) -> Result<Duration> {
        let library = self.files.iter().find(|file| file.ends_with(LIBRARY));
        let library = library.with_context(|| format!("{PYTHON} has no {LIBRARY}"))?;
        let directory = unseen(std::slice::from_ref(library))?;
        self.dlopen(copy_in_tree(directory.path(), library).as_os_str())
    }

    fn cold(&self) -> Result<Duration> {
        let directory = unseen(&self.files)?;
        let program = std::fs::canonicalize(PYTHON)?;
        let mut command = Command::new(copy_in_tree(directory.path(), &program));
        command.args(["-c", LIBRARIES]).env("LD_LIBRARY_PATH", directory.path());
        self.run(command.env("PYTHONPATH", directory.path()).env("PYTHONHOME", "/usr"))
    }
}

impl Contender for Starts {
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let mut latencies = Vec::new();
        let redis = if work == "redis" { redis_program()? } else { "" };
        for _ in 0..iterations {
            latencies.push(match work {
                "true" => self.run(&mut Command::new("/bin/true"))?,
                "dlopen" => self.dlopen(LIBRARY.as_ref())?,
                "plug-in" | "plug-ins" => self.load_plugins(false, work == "plug-in")?,
                "large plug-in" | "large plug-ins" => self.load_plugins(true, work == "large plug-in")?,
                "cold dlopen" => self.cold_dlopen()?,
                "cold" => self.cold()?,
                "redis" => self.run(Command::new(redis).arg0("redis-server").arg("--version"))?,
                "nginx" => {
                    let settings = self.directory.path().join("nginx.conf");
                    self.run(Command::new("nginx").args(["-t", "-q", "-c"]).arg(settings))?
                }
                "git" => self.run(
                    Command::new("git")
                        .args(["config", "--list", "--system"])
                        .env("GIT_CONFIG_NOSYSTEM", "1"),
                )?,
                _ => self.run(Command::new(PYTHON).args(["-c", LIBRARIES]))?,
            });
        }
        Sample::of_latencies(latencies)
    }
}

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("orc-load", "Starts of programs that share beside plain ones");
    let entry = |name: &'static str, way| Entry::new(name, move || Starts::new(way));
    let rivals =
        [entry("plain", Way::Plain), entry("floor", Way::Floor), entry("empty preload", Way::Preload)];
    let cases = [
        ("true", "true", Unit::Microseconds),
        ("git", "git --version", Unit::Microseconds),
        ("redis", "redis-server --version", Unit::Microseconds),
        ("nginx", "nginx -t", Unit::Milliseconds),
        ("python", "python with libraries", Unit::Milliseconds),
        ("dlopen", "dlopen of libcrypto", Unit::Microseconds),
        ("plug-in", "dlopen of a small plug-in", Unit::Microseconds),
        ("plug-ins", "dlopen of 300 small plug-ins", Unit::Microseconds),
        ("large plug-in", "dlopen of a large plug-in", Unit::Microseconds),
        ("large plug-ins", "dlopen of 100 large plug-ins", Unit::Microseconds),
        ("cold dlopen", "dlopen of libcrypto from a new tree, cold", Unit::Microseconds),
        ("cold", "python from a new tree, cold", Unit::Milliseconds),
    ];
    let cases = cases.map(|(work, name, unit)| {
        Case::new(work).quantity(format!("{name}/p50"), Quantity::Percentile(50.0, unit)).quick(true)
    });
    bench.group(Group::new("orc-load", entry("orrery orc run", Way::Ours), rivals).by_pairs().cases(cases));
    bench.run()
}
