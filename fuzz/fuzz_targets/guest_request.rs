//! Has libFuzzer run the target `guest_request`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("guest_request", input));
