//! The recipes of the book do what they say, with what `make install` installs. In roots of their own, with packages, `make
//! soak` runs them (scripts/bare-machine).

#![expect(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Returns where everything is installed, once for all tests.
fn installed() -> PathBuf {
    static PREFIX: OnceLock<tempfile::TempDir> = OnceLock::new();
    let directory = PREFIX.get_or_init(|| {
        for library in
            ["liborrery.a", "liborrery_signer.a", "liborthros.a", "orrery-guest", "orrery-warm-python"]
        {
            // Panics with the command that builds it.
            let _ = orrery_testing::built(library);
        }
        let directory = tempfile::tempdir().unwrap();
        for script in ["stage", "install"] {
            let status = Command::new(orrery_testing::root().join("packaging").join(script))
                .arg(orrery_testing::target_directory())
                .arg(directory.path().join("stage"))
                .env("PREFIX", directory.path().join("prefix"))
                .stdin(Stdio::null())
                .status()
                .unwrap();
            assert!(status.success(), "packaging/{script}: {status}");
        }
        directory
    });
    directory.path().join("prefix")
}

/// Runs a recipe, if this machine has the programs that it would install.
fn works(recipe: &str, needs: &[&str]) {
    if let Some(absent) = needs.iter().find(|program| !orrery_testing::is_there(program)) {
        orrery_testing::skipped!("{absent} is not installed");
        return;
    }
    let output = Command::new(orrery_testing::root().join("scripts/recipe"))
        .arg("--installed")
        .arg(installed())
        .arg(orrery_testing::root().join("docs/src").join(recipe))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{recipe}: {said}");
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn a_ci_runs_its_scripts_in_warm_interpreters() {
    works("recipe-scripts.md", &["python3"]);
}

#[test]
fn a_server_has_its_checker_in_an_orbit() {
    works("recipe-checker.md", &["c++", "pkg-config"]);
}

#[test]
fn nginx_serves_without_the_key() {
    if !is_root() {
        orrery_testing::skipped!("nginx changes its user only for root");
        return;
    }
    works("recipe-keys.md", &["nginx", "curl", "openssl", "pgrep"]);
}

#[test]
fn untrusted_programs_and_tool_calls_are_held() {
    works("recipe-untrusted.md", &["python3"]);
}

/// It takes most of a minute: `make soak` follows it in a root of its own.
#[test]
fn a_service_survives_its_kernel() {
    if std::env::var_os("ORRERY_SERVICES").is_none() {
        orrery_testing::skipped!("ORRERY_SERVICES=1 runs it, and `make soak` does in a root of its own");
        return;
    }
    if !is_root() {
        orrery_testing::skipped!("machines and their network are made by root");
        return;
    }
    works(
        "recipe-service.md",
        &["qemu-system-x86_64", "criu", "busybox", "mkfs.ext4", "redis-server", "redis-cli"],
    );
}

/// What a recipe shows and what it does are compared, indeed.
#[test]
fn a_recipe_that_is_wrong_fails() {
    let directory = tempfile::tempdir().unwrap();
    for (text, holds) in [
        ("```sh\na=1\n```\n```console\n$ echo $a; echo 2 >&2\n1\n2\n```\n", true),
        ("```console\n$ echo one two three\none ... three\n$ seq 9\n1\n...\n9\n```\n", true),
        ("```console\n$ echo '1.2'\n1x2\n```\n", false),
        ("```console\n$ echo 1; echo 2\n1\n```\n", false),
        ("```console\n$ true\nsomething\n```\n", false),
        ("```sh\nfalse\n```\n```console\n$ true\n```\n", false),
        ("```sh\ntrue\n```\n", false),
    ] {
        let recipe = directory.path().join("recipe.md");
        std::fs::write(&recipe, text).unwrap();
        let mut script = Command::new(orrery_testing::root().join("scripts/recipe"));
        let output = script.arg(&recipe).stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.status.success(), holds, "{text}{output:?}");
    }
}
