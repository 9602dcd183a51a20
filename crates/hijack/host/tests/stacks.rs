//! What an executive takes of the program's stacks: a signal's frame and a little, whatever the policy asks.

#![cfg(target_arch = "x86_64")]
#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "support/facility.rs"]
mod facility;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use facility::ORRERY;
use orrery_testing::Compiler;

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/sources");
/// Paths, callers and the journal at once.
const PATHS: &str = "[[rule]]\ncall = '%file'\npath = '/secret/**'\ndeny = 'EACCES'\n\n\
                     [[rule]]\ncall = '*'\npath = '/nowhere/**'\ncaller = '/nowhere'\nlog = true\n";
const LOGGED: &str = "[[rule]]\ncall = '*'\nlog = true\n";
/// Each call that names a path is asked for it, and entered.
const OPENED: &str = "[[rule]]\ncall = '%file'\npath = '/**'\nlog = true\n";

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn seen(output: &Output) -> (String, String, Option<i32>, Option<i32>) {
    (text(&output.stdout), text(&output.stderr), output.status.code(), output.status.signal())
}

fn run(words: &[&str]) -> (String, String, Option<i32>, Option<i32>) {
    let mut command = Command::new("timeout");
    seen(&command.args(["--signal=KILL", "200"]).args(words).stdin(Stdio::null()).output().unwrap())
}

fn compile(directory: &Path, source: &str, flags: &[&str]) -> PathBuf {
    let compiler = Compiler::c().flags(["-pthread"]).flags(flags);
    compiler.build(&[Path::new(SOURCES).join(source)], directory.join("tracee"))
}

/// Runs a test with the ways to have an executive that looks at calls: each a list of words, with and without rewritten sites.
fn in_all_ways(test: impl Fn(&Path, &[Vec<String>])) {
    if facility::is_missing() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut ways = Vec::new();
    for (name, policy) in [("paths", PATHS), ("logged", LOGGED), ("opened", OPENED)] {
        let file = directory.path().join(name);
        fs::write(&file, policy).unwrap();
        for patched in [true, false] {
            let mut way = vec!["run"];
            if !patched {
                way.push("--no-patch");
            }
            way.extend(["--policy", file.to_str().unwrap(), "--log", "/dev/null"]);
            ways.push(way.into_iter().map(str::to_owned).collect());
        }
    }
    for way in [&["trace", "-o", "/dev/null"][..], &["trace", "-k", "-o", "/dev/null"], &["run"]] {
        ways.push(way.iter().map(|word| (*word).to_owned()).collect());
    }
    test(directory.path(), &ways);
}

fn with<'a>(way: &'a [String], words: &[&'a str]) -> Vec<&'a str> {
    let way = way.iter().map(String::as_str);
    std::iter::once(*ORRERY).chain(way).chain(["--"]).chain(words.iter().copied()).collect()
}

/// Checks that cases of `stacks.c` are the same natively and in all ways.
fn assert_same(words: &[&str]) {
    in_all_ways(|directory, ways| {
        let tracee = compile(directory, "stacks.c", &[]);
        let words: Vec<&str> =
            std::iter::once(tracee.to_str().unwrap()).chain(words.iter().copied()).collect();
        let expected = run(&words);
        assert_eq!((&*expected.1, expected.2), ("", Some(0)), "{expected:?}");
        for way in ways {
            assert_eq!(run(&with(way, &words)), expected, "{way:?}");
        }
    });
}

/// `AT_MINSIGSTKSZ` leaves so much for a call in a signal's handler.
#[test]
fn calls_take_no_more_of_a_stack_than_is_reported() {
    /// A context that is shown in front of a frame.
    const SHOWN: u64 = 512;
    in_all_ways(|directory, ways| {
        let tracee = compile(directory, "stacks.c", &[]);
        let least = |words: &[&str]| -> u64 {
            let words = [words, &["env", "LD_SHOW_AUXV=1", "true"]].concat();
            let shown = run(&words).0;
            let line = shown.lines().find_map(|line| line.strip_prefix("AT_MINSIGSTKSZ:")).map(str::trim);
            line.unwrap_or_else(|| panic!("{shown}")).parse().unwrap()
        };
        let native = least(&[]);
        for way in ways {
            let reported = least(&with(way, &[]));
            // Fewer than what Chromium, and the C library's least stack of a thread, can bear.
            assert!(
                reported > 2 * native && reported < 2 * native + (5 << 10),
                "{way:?}: {reported}, natively {native}"
            );
            let most = (reported - native - SHOWN).to_string();
            let depth = run(&with(way, &[tracee.to_str().unwrap(), "depth", &most]));
            assert_eq!(depth, (String::new(), String::new(), Some(0), None), "{way:?}");
        }
    });
}

#[test]
fn threads_of_the_least_stack_open_files() {
    assert_same(&["least"]);
}

#[test]
fn alternate_stacks_of_the_classic_size_beside_large_ones_are_enough() {
    assert_same(&["alternate"]);
}

/// Each of these calls has memory of the executive's, which nobody releases.
#[test]
fn calls_that_handlers_leave_for_good_do_not_add_up() {
    assert_same(&["jumps", "260"]);
}

#[test]
fn calls_of_threads_that_end_in_handlers_do_not_add_up() {
    assert_same(&["ended", "260"]);
}

/// Its threads have alternate stacks, its leak checker a thread on a small one; it ends with 1 or 23 where it cannot look.
#[test]
fn sanitized_programs_are_the_same() {
    in_all_ways(|directory, ways| {
        let tracee = compile(directory, "sanitized.c", &["-fsanitize=address", "-g"]);
        let words = [tracee.to_str().unwrap()];
        let expected = run(&words);
        assert_eq!(expected, ("worked\n".to_owned(), String::new(), Some(0), None));
        for way in ways {
            assert_eq!(run(&with(way, &words)), expected, "{way:?}");
        }
    });
}

/// A browser ends where the least stack of a thread is no 16 KiB, has threads by the hundred, protection keys, small stacks, and
/// processes that learn each other's PIDs by messages (`--enforce`).
#[test]
fn a_browser_renders_a_page() {
    if !orrery_testing::is_there("chromium") {
        return;
    }
    in_all_ways(|directory, ways| {
        let page = directory.join("page.html");
        let text = "<p id=p>before</p><script>p.textContent = [1, 2, 3].map(a => a * a).join()</script>";
        fs::write(&page, text).unwrap();
        let enforced = directory.join("enforced");
        fs::write(&enforced, "[[rule]]\ncall = '%file'\npath = '/secret/**'\ndeny = 'EACCES'\n").unwrap();
        let enforced = ["run", "--enforce", "--policy", enforced.to_str().unwrap()].map(str::to_owned);
        let home = directory.join("home");
        fs::create_dir(&home).unwrap();
        let (home, page) = (format!("HOME={}", home.display()), format!("file://{}", page.display()));
        let words =
            ["env", &home, "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", &page];
        let rendered = |(output, errors, code, _): (String, String, Option<i32>, Option<i32>)| {
            assert!(output.contains("<p id=\"p\">1,4,9</p>"), "{output}\n{errors}");
            code
        };
        let expected = rendered(run(&words));
        let mut ways = ways.to_vec();
        // Only the superuser's monitor sends messages in the program's name.
        if rustix::process::geteuid().is_root() {
            ways.push(enforced.to_vec());
        }
        for way in &ways {
            assert_eq!(rendered(run(&with(way, &words))), expected, "{way:?}");
        }
    });
}

/// Programs that provide an alternate stack may run on stacks of 2 KiB (Go): nothing writes below these, whichever calls are named.
#[test]
fn small_stacks_are_not_overflowed() {
    assert_same(&["small"]);
    assert_same(&["small-early"]);
}
