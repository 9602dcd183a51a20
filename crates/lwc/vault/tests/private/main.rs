//! A vault that belongs to one thread of one process.
//!
//! Contexts belong to a process, and end with it, so each case is a process of its own: this program runs itself once
//! for each case.

#![expect(clippy::unwrap_used, reason = "tests of system calls")]

#[allow(dead_code, reason = "helpers of the tests of contexts")]
#[path = "../../../context/tests/contexts/pages.rs"]
mod pages;
#[allow(dead_code, reason = "helpers of the tests of contexts")]
#[path = "../../../context/tests/contexts/support.rs"]
mod support;
mod vaults;

use vaults::*;

orrery_testing::cases![
    seconds = 120, trackers = &[];
    a_vault_serves,
    a_vault_keeps_its_secret,
    a_vault_that_panics_is_dead,
    a_vault_that_cannot_load_says_why,
];
