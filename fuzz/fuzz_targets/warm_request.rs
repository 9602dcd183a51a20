//! Has libFuzzer run the target `warm_request`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("warm_request", input));
