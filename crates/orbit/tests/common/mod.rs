//! Runs each case in a process of its own, once for each tracker: orbits are forked, and forking belongs to a process
//! whose threads the case chose itself.

use std::alloc::Layout;
use std::process::Command;

use libtest_mimic::{Arguments, Failed, Trial};
use orrery_orbit::{Area, AreaOptions};

const CASE: &str = "ORRERY_TEST_CASE";

pub(crate) type Case = (&'static str, fn());

pub(crate) fn main(cases: &'static [Case]) {
    if let Ok(name) = std::env::var(CASE) {
        let (_, run) = cases.iter().find(|(case, _)| *case == name).expect("a case of that name");
        run();
        println!("case done");
        return;
    }
    let arguments = Arguments::from_args();
    let trials = cases
        .iter()
        .flat_map(|(name, _)| ["wp_async", "compare"].map(|tracker| (*name, tracker)))
        .map(|(name, tracker)| Trial::test(format!("{name}/{tracker}"), move || run_case(name, tracker)))
        .collect();
    libtest_mimic::run(&arguments, trials).exit();
}

fn run_case(name: &str, tracker: &str) -> Result<(), Failed> {
    // A case that hangs fails.
    let output = Command::new("timeout")
        .args(["--signal=KILL", "120"])
        .arg(std::env::current_exe()?)
        .env(CASE, name)
        .env("ORRERY_TRACKER", tracker)
        .env_remove("RUST_BACKTRACE")
        .output()?;
    let text = format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    if text.contains("tracker wp_async does not work here") {
        println!("SKIPPED {name}/{tracker}: {text}");
        return Ok(());
    }
    if text.contains("SKIPPED") {
        println!("{name}/{tracker}: {text}");
    }
    if output.status.success() && text.contains("case done") { Ok(()) } else { Err(text.into()) }
}

macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        fn main() {
            common::main(&[$((stringify!($name), $name)),*]);
        }
    };
}

pub(crate) use cases;

/// A fresh area.
pub(crate) fn area() -> Area {
    Area::new(64 << 10, &AreaOptions::default()).unwrap()
}

/// A number in `area`.
pub(crate) fn number(area: &Area) -> *mut i64 {
    area.allocate(Layout::new::<i64>()).unwrap().cast().as_ptr()
}

/// The bytes of a pointer, as arguments.
pub(crate) fn address<T>(pointer: *const T) -> [u8; 8] {
    pointer.expose_provenance().to_ne_bytes()
}

/// Whether a process is gone or a zombie, after a while.
pub(crate) fn ends(pid: u32) -> bool {
    let begin = std::time::Instant::now();
    while begin.elapsed() < std::time::Duration::from_secs(20) {
        match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Err(_) => return true,
            Ok(stat) if stat.rsplit(')').next().unwrap().trim_start().starts_with(['Z', 'X']) => return true,
            Ok(_) => std::thread::sleep(std::time::Duration::from_millis(2)),
        }
    }
    false
}
