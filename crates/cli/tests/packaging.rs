//! What is made for distributions: crates, RPM packages, the archive of sources.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, Stdio};

use serde_json::Value;

fn succeed(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}\n{error}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).args(["--offline", "--locked"]).current_dir(orrery_testing::root());
    command
}

/// Returns the packages that packaging/files.txt names.
fn packages() -> BTreeSet<String> {
    let list = fs::read_to_string(orrery_testing::root().join("packaging/files.txt")).unwrap();
    let lines = list.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

#[test]
fn libraries_can_be_packaged_as_crates() {
    let metadata = succeed(&mut cargo(&["metadata", "--no-deps", "--format-version", "1"]));
    let metadata: Value = serde_json::from_str(&metadata).unwrap();
    let crates = metadata["packages"].as_array().unwrap();
    let published: Vec<_> = crates.iter().filter(|package| package["publish"].is_null()).collect();
    assert!(published.len() > 20, "{}", published.len());
    let directory = tempfile::tempdir().unwrap();
    let mut package = cargo(&["package", "--no-verify", "--allow-dirty"]);
    for each in &published {
        for field in ["description", "license"] {
            assert!(each[field].is_string(), "{} has no {field}", each["name"]);
        }
        package.args(["-p", each["name"].as_str().unwrap()]);
        // What it depends on can be had where it is had.
        for dependency in each["dependencies"].as_array().unwrap() {
            let name = dependency["name"].as_str().unwrap();
            let ours = name.starts_with("orrery-") && dependency["kind"] != "dev";
            let published = published.iter().any(|other| other["name"] == name);
            assert!(!ours || published, "{} depends on {name}, which is not published", each["name"]);
            assert!(!ours || dependency["req"] == format!("^{}", env!("CARGO_PKG_VERSION")), "{dependency}");
        }
    }
    succeed(package.env("CARGO_TARGET_DIR", directory.path()));
    let made = fs::read_dir(directory.path().join("package")).unwrap().flatten();
    let made = made.filter(|entry| entry.path().extension().is_some_and(|extension| extension == "crate"));
    assert_eq!(made.count(), published.len());
}

#[test]
fn rpm_and_debian_have_the_packages_of_the_list() {
    let control = fs::read_to_string(orrery_testing::root().join("packaging/debian/control")).unwrap();
    let debian = control.lines().filter_map(|line| line.strip_prefix("Package: ")).map(str::to_owned);
    assert_eq!(debian.collect::<BTreeSet<_>>(), packages());
    if !orrery_testing::is_there("rpmspec") {
        orrery_testing::skipped!("rpmspec is not installed");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let spec = directory.path().join("orrery.spec");
    let template = fs::read_to_string(orrery_testing::root().join("packaging/orrery.spec.in")).unwrap();
    fs::write(&spec, template.replace("@VERSION@", env!("CARGO_PKG_VERSION"))).unwrap();
    let mut query = Command::new("rpmspec");
    query.args(["--query", "--queryformat", "%{name}\n"]).arg(&spec).env("HOME", directory.path());
    let rpm = succeed(&mut query);
    assert_eq!(rpm.lines().map(str::to_owned).collect::<BTreeSet<_>>(), packages());
    for package in packages() {
        assert!(template.contains(&format!("-f %{{_builddir}}/{package}.files")), "{package}");
    }
}

#[test]
fn the_archive_has_what_is_committed_and_is_the_same_each_time() {
    let inside = Command::new("git").args(["rev-parse", "HEAD"]).current_dir(orrery_testing::root()).output();
    if !inside.is_ok_and(|output| output.status.success()) {
        orrery_testing::skipped!("this is no git repository");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let dist = || {
        let mut script = Command::new(orrery_testing::root().join("packaging/dist"));
        let path = succeed(script.arg(directory.path()));
        (fs::read(path.trim()).unwrap(), path.trim().to_owned())
    };
    let (first, path) = dist();
    assert_eq!(first, dist().0);
    assert!(path.ends_with(&format!("/orrery-{}.tar.gz", env!("CARGO_PKG_VERSION"))), "{path}");
    let listed = succeed(Command::new("tar").arg("-tzf").arg(&path));
    let listed: BTreeSet<_> = listed.lines().filter(|line| !line.ends_with('/')).collect();
    let tracked = succeed(
        Command::new("git")
            .args(["ls-tree", "-r", "--name-only", "HEAD"])
            .current_dir(orrery_testing::root()),
    );
    let top = format!("orrery-{}", env!("CARGO_PKG_VERSION"));
    let tracked: BTreeSet<_> = tracked.lines().map(|name| format!("{top}/{name}")).collect();
    assert_eq!(listed, tracked.iter().map(String::as_str).collect());
}

#[test]
fn an_unpacked_archive_has_its_links_and_not_what_was_built() {
    let directory = tempfile::tempdir().unwrap();
    let top = directory.path();
    for place in ["packaging", "target"] {
        fs::create_dir(top.join(place)).unwrap();
    }
    orrery_testing::copy_program(
        orrery_testing::root().join("packaging/sources"),
        top.join("packaging/sources"),
    );
    for file in ["a file", "target/built"] {
        fs::write(top.join(file), "").unwrap();
    }
    std::os::unix::fs::symlink("a file", top.join("link")).unwrap();
    let listed = succeed(&mut Command::new(top.join("packaging/sources")));
    let listed: BTreeSet<_> = listed.split_terminator('\0').collect();
    assert_eq!(listed, BTreeSet::from(["./a file", "./link", "./packaging/sources"]));
}
