//! Has libFuzzer run the target `guard_policy`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("guard_policy", input));
