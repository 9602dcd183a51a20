//! Has libFuzzer run the target `executive_policy`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("executive_policy", input));
