//! Has libFuzzer run the target `maps`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("maps", input));
