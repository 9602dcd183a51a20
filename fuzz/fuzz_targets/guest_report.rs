//! Has libFuzzer run the target `guest_report`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("guest_report", input));
