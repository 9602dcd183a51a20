//! Has libFuzzer run the target `orbit_update`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("orbit_update", input));
