//! Has libFuzzer run the target `seccomp_profile`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("seccomp_profile", input));
