//! Has libFuzzer run the target `registry_layer`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("registry_layer", input));
