//! Has libFuzzer run the target `unit`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("unit", input));
