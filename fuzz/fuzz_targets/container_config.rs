//! Has libFuzzer run the target `container_config`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("container_config", input));
