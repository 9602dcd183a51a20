//! Has libFuzzer run the target `warm_reply`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("warm_reply", input));
