//! Has libFuzzer run the target `compiled_handler`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("compiled_handler", input));
