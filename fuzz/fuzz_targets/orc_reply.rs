//! Has libFuzzer run the target `orc_reply`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("orc_reply", input));
