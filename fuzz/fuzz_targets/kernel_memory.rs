//! Has libFuzzer run the target `kernel_memory`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("kernel_memory", input));
