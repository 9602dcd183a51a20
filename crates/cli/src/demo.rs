//! `orrery demo`: a tour of what Orrery does, one screen for each part.

mod guard;
mod orbit;
mod orc;
mod orthros;
mod picture;
mod stage;
mod trace;
mod warm;

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;

use self::stage::{Skipped, Stage, Stopped};

/// Show Orrery at work: one screen for each part, at most 20 s each
///
/// Ctrl-C leaves out the rest of a screen; twice within a second it ends the demonstration. What this machine cannot
/// show is named, with what is missing. The exit status is 1 if something did not work as it should.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Show these parts alone [default: all]
    #[arg(value_name = "NAME", value_parser = PossibleValuesParser::new(SCENES.iter().map(|scene| scene.name)))]
    names: Vec<String>,
    /// Print the names of all parts, and show nothing
    #[arg(long)]
    list: bool,
    /// Seconds that each part may take, before the rest of it is left out
    #[arg(long, value_name = "N", default_value_t = 20)]
    seconds: u64,
}

/// One part of the tour.
struct Scene {
    name: &'static str,
    title: &'static str,
    /// The task of `orrery doctor` that must work here.
    task: &'static str,
    /// Programs that it needs besides, with their packages.
    programs: &'static [(&'static str, &'static str)],
    show: fn(&mut Stage) -> Result<()>,
    /// What to try next.
    next: &'static str,
}

/// The tour, in its order: the main job first. A new part is a row here and a file beside `demo/warm.rs`.
const SCENES: &[Scene] = &[
    Scene {
        name: "warm",
        title: "Python scripts run in interpreters that have started already, and are rolled back (lwc)",
        task: "warm",
        programs: &[],
        show: warm::show,
        next: "orrery warm serve --python --import json,re --socket /tmp/w &   orrery warm run --socket /tmp/w SCRIPT.py",
    },
    Scene {
        name: "guard",
        title: "an untrusted program asks a monitor, which it cannot reach (lwc)",
        task: "guard",
        programs: &[("bash", "bash")],
        show: guard::show,
        next: "orrery guard --learn policy.toml -- PROGRAM   orrery guard --policy policy.toml -- PROGRAM",
    },
    Scene {
        name: "orbit",
        title: "a program's auxiliary tasks crash, hang and starve without the program (orbit)",
        task: "orbit",
        programs: &[],
        show: orbit::show,
        next: "make -C examples/kv run   orrery orbits --watch",
    },
    Scene {
        name: "trace",
        title: "an executive under an unmodified program sees its system calls (hijack)",
        task: "trace",
        programs: &[("find", "findutils")],
        show: trace::show,
        next: "orrery trace -c -- PROGRAM   orrery run --policy policy.toml -- PROGRAM   orrery faults -- PROGRAM",
    },
    Scene {
        name: "orc",
        title: "equal code is in memory once, whatever files it comes from (orc)",
        task: "orc",
        programs: &[("python3", "python3")],
        show: orc::show,
        next: "orrery orc serve &   orrery orc run -- PROGRAM   orrery orc stat --watch",
    },
    Scene {
        name: "orthros",
        title: "a kernel panics, and the service goes on under another (orthros)",
        task: "orthros",
        programs: &[("redis-server", "redis-server")],
        show: orthros::show,
        next: "orrery orthros up --help   orrery orthros check PID",
    },
];

/// Shows the tour, or what was named of it.
///
/// # Errors
/// A part that did not work as it should.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if arguments.list {
        for scene in SCENES {
            println!("{:8} {}", scene.name, scene.title);
        }
        return Ok(());
    }
    let named =
        |scene: &&Scene| arguments.names.is_empty() || arguments.names.iter().any(|name| name == scene.name);
    let scenes: Vec<&Scene> = SCENES.iter().filter(named).collect();
    let mut stage = Stage::new(Duration::from_secs(arguments.seconds))?;
    let mut failed = Vec::new();
    let (mut shown, begin) = (0, Instant::now());
    for (number, scene) in scenes.iter().enumerate() {
        stage.begin();
        println!(
            "\n{}  {}: {}\n",
            picture::bold(&format!("{}/{}", number + 1, scenes.len())),
            scene.name,
            scene.title
        );
        if let Some(missing) = missing(scene) {
            println!("  not shown here: needs {missing}");
            continue;
        }
        match (scene.show)(&mut stage) {
            Ok(()) => {
                shown += 1;
                println!("\n  try: {}", scene.next.replace("   ", "\n       "));
            }
            Err(error) if error.is::<Stopped>() => {
                println!("  stopped");
                // Which removes its directory.
                drop(stage);
                std::process::exit(stage::INTERRUPTED);
            }
            Err(error) if error.is::<Skipped>() => println!("  {error}"),
            Err(error) => {
                println!("  FAILED: {error:#}");
                failed.push(scene.name);
            }
        }
    }
    println!("\n{shown} of {} parts shown in {:.0} s", scenes.len(), begin.elapsed().as_secs_f64());
    if failed.is_empty() { Ok(()) } else { bail!("cannot show {}: see above", failed.join(", ")) }
}

/// Returns what this machine lacks for a scene.
fn missing(scene: &Scene) -> Option<String> {
    let mut missing = crate::doctor::obstacles(scene.task);
    for (program, package) in scene.programs {
        if !crate::doctor::is_installed(program) {
            missing.push(format!("{program} (package {package})"));
        }
    }
    (!missing.is_empty()).then(|| missing.join("; "))
}
