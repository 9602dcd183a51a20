//! Has libFuzzer run the target `vault_message`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| orrery_fuzz::run("vault_message", input));
