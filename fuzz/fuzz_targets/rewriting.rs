//! Has libFuzzer run the target `rewriting`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("rewriting", input));
