//! Has libFuzzer run the target `mount_link`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("mount_link", input));
