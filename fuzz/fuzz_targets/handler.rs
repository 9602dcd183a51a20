//! Has libFuzzer run the target `handler`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("handler", input));
