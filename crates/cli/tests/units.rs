//! The units of systemd, used as an administrator uses them: on a copy of this machine that systemd boots in a container.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use orrery_testing::{built, root};

/// The exit status of `scripts/under-systemd` where it cannot boot a container.
const CANNOT_BOOT: i32 = 125;

/// Copies a program without its debugging information, which would take memory in the container.
fn strip(name: &str, to: &Path) {
    let status = Command::new("strip").arg("-o").arg(to).arg(built(name)).status().unwrap();
    assert!(status.success(), "strip {name}: {status}");
}

#[test]
fn units_start_reload_and_stop_what_they_are_of() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can boot a container");
        return;
    }
    for needed in ["/usr/bin/systemd-nspawn", "/lib/systemd/systemd"] {
        if !Path::new(needed).exists() {
            orrery_testing::skipped!("{needed} is not there: install systemd-container");
            return;
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(root().join("scripts/under-systemd"));
    let mut copy = |from: &Path, to: &str| {
        command.arg("--copy").arg(format!("{}={to}", from.to_str().unwrap()));
    };
    // A pair of machines takes half a minute to come and go: `make soak` has it.
    let is_whole = std::env::var_os("ORRERY_WHOLE").is_some();
    let programs = [
        ("orrery", "bin"),
        ("orrery-manager", "libexec/orrery"),
        ("orrery-warm-python", "libexec/orrery"),
        ("orrery-warm-http", "libexec/orrery"),
        ("orrery-guest", "libexec/orrery"),
        ("orrery-orthros-load", "libexec/orrery"),
    ];
    for (name, place) in programs.into_iter().take(if is_whole { 6 } else { 4 }) {
        let stripped = directory.path().join(name);
        strip(name, &stripped);
        copy(&stripped, &format!("/usr/local/{place}/{name}"));
    }
    for unit in fs::read_dir(root().join("packaging/systemd")).unwrap() {
        let template = unit.unwrap().path();
        if !is_whole && template.to_str().unwrap().contains("orthros") {
            continue;
        }
        let unit = directory.path().join(template.file_stem().unwrap());
        let text = fs::read_to_string(&template).unwrap().replace("@BINDIR@", "/usr/local/bin");
        assert!(!text.contains('@') || template.to_str().unwrap().contains('@'), "{text}");
        fs::write(&unit, text).unwrap();
        copy(&unit, &format!("/etc/systemd/system/{}", unit.file_name().unwrap().to_str().unwrap()));
    }
    copy(&root().join("packaging/try-units"), "/orrery-try");
    let output = command.args(["/", "/orrery-try"]).stdin(Stdio::null()).output().unwrap();
    let (said, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.code() == Some(CANNOT_BOOT) {
        orrery_testing::skipped!("{error}");
        return;
    }
    assert!(output.status.success(), "{}\n{said}\n{error}", output.status);
    assert!(said.contains("try-units: all well"), "{said}\n{error}");
    println!("{said}");
}
