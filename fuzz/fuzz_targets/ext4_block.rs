//! Has libFuzzer run the target `ext4_block`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("ext4_block", input));
