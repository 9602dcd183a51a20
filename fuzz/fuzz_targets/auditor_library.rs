//! Has libFuzzer run the target `auditor_library`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("auditor_library", input));
