//! Has libFuzzer run the target `mapped_library`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("mapped_library", input));
