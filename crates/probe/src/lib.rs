//! The facilities of the kernel, the processor and the machine that Orrery uses: each is found by trying it.
//!
//! A kernel's version says little: facilities are back-ported, configured out, switched off at run time, or kept from
//! this very process by a seccomp filter, a container or a missing privilege. So a probe does a tiny instance of the
//! real thing (protects a page, writes to it and looks whether the write was recorded; installs a filter and answers
//! it) and reports what it met.
//!
//! # How a probe cannot do harm
//!
//! A filter may answer a forbidden system call by killing the caller, a half-supported facility may fault or never
//! return. Therefore a probe runs in a forked child with a time limit, and its answer comes back through a pipe
//! (the module `child`). Between `fork` and `_exit` the probes keep to async-signal-safe code: system calls, the stack
//! and fresh mappings; no allocation, no lock, no panic. What a probe changes (namespaces, filters, scheduling class,
//! network devices) dies with its child. Only code that reads files, makes a control group (removed again) or starts
//! an installed program (`qemu --version`) runs in the caller's process, and only there the module allocates.
//!
//! # Adding a facility
//!
//! Each file of this module is a family with a table; a row names the facility, the systems that use it, what for, what
//! is used instead, and its probe.

mod cgroups;
mod child;
mod dispatch;
mod facility;
mod filters;
mod layout;
mod machine;
mod mappings;
mod namespaces;
mod processes;
mod processor;
mod row;
mod scheduling;
mod text;
mod tools;
mod tracking;
mod uring;

use std::time::{Duration, Instant};

pub use facility::{Facility, Group, State, System};
use row::Family;

/// How long probes that hang may take together, before later ones get less time.
const BUDGET: Duration = Duration::from_millis(800);
/// How long one probe may take, and the least that is left to one when the budget is spent. A probe takes well under a
/// millisecond, or some milliseconds where it makes a namespace or a control group; the rest is for busy machines.
const LONGEST: Duration = Duration::from_millis(400);
const SHORTEST: Duration = Duration::from_millis(50);

const FAMILIES: &[Family] = &[
    tracking::FAMILY,
    layout::FAMILY,
    mappings::FAMILY,
    processes::FAMILY,
    namespaces::FAMILY,
    filters::FAMILY,
    cgroups::FAMILY,
    scheduling::FAMILY,
    processor::FAMILY,
    machine::FAMILY,
];

/// Tries every facility, in a fixed order, grouped by [`Facility::group`].
///
/// Takes about 0.1 s, and still less than a second where a probe or two hang (they count as missing then). Forks
/// children and reaps them; leaves nothing behind.
pub fn all() -> Vec<Facility> {
    let mut lost = Duration::ZERO;
    let rows = FAMILIES.iter().flat_map(|family| family.rows.iter().map(move |row| (family.group, row)));
    rows.map(|(group, row)| {
        let limit = BUDGET.saturating_sub(lost).clamp(SHORTEST, LONGEST);
        let start = Instant::now();
        let state = row.probe.run(limit);
        lost += Some(start.elapsed()).filter(|took| *took >= limit).unwrap_or_default();
        Facility {
            name: row.name,
            group,
            state,
            purpose: row.purpose,
            systems: row.systems,
            fallback: row.fallback,
        }
    })
    .collect()
}

#[cfg(test)]
mod tests;
