//! Everything that the kernel says about a service's sockets, files, memory and processes is the same after a failover, or a remark of
//! it says what is not. SKIPPED where QEMU, criu, a kernel or root are absent.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "orthros/pairs.rs"]
mod pairs;

use pairs::{ONE_PAIR, Up, missing};

/// What may differ if a remark says so: how a line of the verdict begins, and words of the remark.
const REMARKED: &[(&str, &str)] =
    &[("lease: ", "lease"), ("child that shares memory: lives -> has ended", "shares the memory")];

#[test]
fn every_setting_is_the_same_after_a_failover_or_a_remark_says_so() {
    if let Some(why) = missing(&[]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let mut up = Up::start(&[], &["orrery-orthros-load", "settings"]);
    up.expect("help");
    let mut remarks = String::new();
    // What the second kernel says was made of what the first one left, and must do as well.
    for _ in 0..2 {
        up.say("crash panic");
        let survived = up.expect("survived");
        remarks.push_str(&survived["failover"]["summary"]["remarks"].to_string());
        let verdict = up.verdict();
        let is_remarked = |line: &&str| {
            REMARKED.iter().any(|(begin, words)| line.starts_with(begin) && remarks.contains(words))
        };
        let silent: Vec<&str> =
            verdict.lines().filter(|line| *line != "nothing differs" && !is_remarked(line)).collect();
        assert!(silent.is_empty(), "{}\nremarks: {remarks}", silent.join("\n"));
        // With a copy of the memory it would go wrong silently.
        assert!(verdict.contains("child that shares memory: lives -> has ended"), "{verdict}");
        up.expect("renewed");
    }
    up.say("quit");
    up.expect("end");
}
