//! `make bench B=orc-load`: what it costs to start a program that shares its code.
//!
//! The store knows the files from the first start on: what is measured is warm. A program that does nothing shows the fixed
//! cost, one that loads libraries what users notice.

use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use orrery_bench::{Bench, Case, Contender, Entry, Group, Options, Quantity, Unit, machine, single};
use orrery_orc::Client;
use tempfile::TempDir;

/// Starts of programs that share beside plain ones
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

const PROGRAMS: [(&str, &[&str]); 2] = [
    ("true", &["/bin/true"]),
    ("python with libraries", &["/usr/bin/python3", "-c", "import ssl, sqlite3, json, ctypes, decimal"]),
];

/// A store that ends with this object.
struct Store {
    keeper: Child,
    folder: TempDir,
}

impl Store {
    fn start() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut command = Command::new(machine::program_folder()?.join("orrery"));
        command.args(["orc", "serve", "--directory"]).arg(folder.path()).stdin(Stdio::null());
        let store = Self { keeper: command.spawn().context("start the store")?, folder };
        let begin = Instant::now();
        while Client::connect_to(store.folder.path()).is_err() {
            if begin.elapsed() > Duration::from_secs(30) {
                bail!("the store does not answer");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(store)
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.keeper.id()) {
            // SAFETY: a signal to a child of ours that was not waited for.
            unsafe { libc::kill(pid, libc::SIGTERM) };
        }
        let _ = self.keeper.wait();
    }
}

fn start(work: &str, variables: &[(&str, std::ffi::OsString)]) -> Result<()> {
    let program = PROGRAMS.iter().find(|(name, _)| *name == work).context("no such program")?.1;
    let mut command = Command::new(program[0]);
    command.args(&program[1..]).stdin(Stdio::null()).stdout(Stdio::null());
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    ensure!(command.status()?.success(), "{work} failed");
    Ok(())
}

fn ours() -> Result<impl Contender> {
    let store = Store::start()?;
    let auditor = orrery_orc::auditor::find(store.folder.path()).context("find the auditor")?;
    let variables =
        [("ORRERY_ORC", store.folder.path().as_os_str().to_owned()), ("LD_AUDIT", auditor.into_os_string())];
    Ok(single(move |work: &str| {
        let _ = &store;
        start(work, &variables)
    }))
}

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("orc-load", Arguments::parse().options);
    let plain = Entry::new("plain", || Ok(single(|work: &str| start(work, &[]))));
    let mut group = Group::new("orc-load", Entry::new("orrery orc run", ours)).against(plain);
    for (name, _) in PROGRAMS {
        group = group.case(
            Case::new(name)
                .quantity(format!("{name}/p50"), Quantity::Percentile(50, Unit::Milliseconds))
                .quick(true),
        );
    }
    bench.group(group);
    bench.run()
}
