//! Cases that each want a process of their own: a test program without a harness runs itself once for each.

use std::io::Write;
use std::process::Command;

use libtest_mimic::{Arguments, Failed, Trial};

/// Names the case to the process that is to run it.
const CASE: &str = "ORRERY_TEST_CASE";
/// Names the tracker to it.
const TRACKER: &str = "ORRERY_TRACKER";
/// What a process says at the end of its case: one that ended early did not.
const DONE: &str = "case done";

/// All trackers, for [`run`].
pub const TRACKERS: &[&str] = &["wp_async", "compare"];

/// A case: its name, and what it does. It fails by a panic.
pub type Case = (&'static str, fn());

/// Makes a main function that runs these functions as cases named by their paths ([`run`]).
///
/// ```ignore
/// orrery_testing::cases![seconds = 60, trackers = &[]; it_begins, it_ends];
/// ```
#[macro_export]
macro_rules! cases {
    (seconds = $seconds:expr, trackers = $trackers:expr; $($name:path),* $(,)?) => {
        fn main() {
            $crate::run(&[$((::core::stringify!($name), $name)),*], $trackers, $seconds);
        }
    };
}

/// The main function of a test program: runs the case that the environment names, or else each case in a process of its
/// own, once, or once under each of the trackers. A case that takes longer than `seconds` fails.
///
/// What a case says about being skipped is passed on.
pub fn run(cases: &'static [Case], trackers: &'static [&'static str], seconds: u32) {
    if let Ok(name) = std::env::var(CASE) {
        let found = cases.iter().find(|(case, _)| *case == name);
        let Some((_, case)) = found else { panic!("no case is called {name}") };
        case();
        println!("{DONE}");
        return;
    }
    let arguments = Arguments::from_args();
    let trial = |name: &'static str, tracker: Option<&'static str>| {
        let title = tracker.map_or_else(|| name.to_owned(), |tracker| format!("{name}/{tracker}"));
        Trial::test(title.clone(), move || run_apart(&title, name, tracker, seconds))
    };
    let trials = cases.iter().flat_map(|(name, _)| match trackers {
        [] => vec![trial(name, None)],
        trackers => trackers.iter().map(|tracker| trial(name, Some(tracker))).collect(),
    });
    libtest_mimic::run(&arguments, trials.collect()).exit();
}

fn run_apart(title: &str, name: &str, tracker: Option<&str>, seconds: u32) -> Result<(), Failed> {
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", &seconds.to_string()]).arg(std::env::current_exe()?);
    command.env(CASE, name).env_remove("RUST_BACKTRACE");
    if let Some(tracker) = tracker {
        command.env(TRACKER, tracker);
    }
    let output = command.output()?;
    let said = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
    let passed_on = |reason: &str| {
        let _unseen = std::io::stderr().write_all(format!("SKIPPED: {title}: {reason}\n").as_bytes());
    };
    if let Some(why) = said.lines().find(|line| line.contains("tracker wp_async does not work here")) {
        passed_on(why);
        return Ok(());
    }
    said.lines().filter_map(|line| line.strip_prefix("SKIPPED: ")).for_each(passed_on);
    if output.status.success() && said.contains(DONE) {
        Ok(())
    } else {
        Err(format!("{}\n{said}", output.status).into())
    }
}
