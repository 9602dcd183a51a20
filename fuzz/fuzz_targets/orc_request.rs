//! Has libFuzzer run the target `orc_request`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("orc_request", input));
