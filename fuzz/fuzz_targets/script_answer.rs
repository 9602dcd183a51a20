//! Has libFuzzer run the target `script_answer`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("script_answer", input));
