//! Has libFuzzer run the target `policy`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("policy", input));
