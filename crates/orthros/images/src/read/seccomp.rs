//! Seccomp filters, each once, in the order in which they were installed.

use std::collections::HashMap;

use anyhow::{Result, bail};
use orrery_kimage::{Seccomp, Task};

use crate::model::SeccompFilter;

/// `SECCOMP_MODE_FILTER`.
const FILTERED: u32 = 2;

/// The filters of all threads, by their addresses in the kernel.
#[derive(Default)]
pub(super) struct FilterTable {
    known: HashMap<u64, u32>,
    all: Vec<SeccompFilter>,
}

impl FilterTable {
    /// Adds the filters of a thread, and returns its mode and the index of its newest filter.
    pub(super) fn add(&mut self, thread: &Task<'_>) -> Result<(u32, Option<u32>)> {
        self.insert(&thread.seccomp()?)
    }

    fn insert(&mut self, seccomp: &Seccomp) -> Result<(u32, Option<u32>)> {
        if seccomp.filters.iter().any(|filter| filter.is_listened_to) {
            bail!("another process answers for its seccomp filter, which cannot be carried over");
        }
        let mut prev = None;
        for filter in seccomp.filters.iter().rev() {
            let number = match self.known.get(&filter.address) {
                Some(&known) => known,
                None => {
                    let next = u32::try_from(self.all.len())?;
                    let program = filter.program.clone();
                    self.all.push(SeccompFilter { program, previous: prev, logs: filter.logs });
                    self.known.insert(filter.address, next);
                    next
                }
            };
            prev = Some(number);
        }
        if seccomp.mode == FILTERED && prev.is_none() {
            bail!("it is confined by filters, and has none");
        }
        Ok((seccomp.mode, prev))
    }

    pub(super) fn into_filters(self) -> Vec<SeccompFilter> {
        self.all
    }
}

#[cfg(test)]
mod tests {
    use orrery_kimage::SeccompFilter as Found;

    use super::*;

    fn found(address: u64) -> Found {
        Found {
            address,
            program: vec![u8::try_from(address).unwrap(); 8],
            logs: address == 1,
            is_listened_to: false,
        }
    }

    #[test]
    fn shared_filters_are_there_once_and_lead_to_those_before_them() {
        let mut filters = FilterTable::default();
        let parent = Seccomp { mode: 2, filters: vec![found(2), found(1)] };
        let child = Seccomp { mode: 2, filters: vec![found(3), found(2), found(1)] };
        assert_eq!(filters.insert(&parent).unwrap(), (2, Some(1)));
        assert_eq!(filters.insert(&child).unwrap(), (2, Some(2)));
        assert_eq!(filters.insert(&parent).unwrap(), (2, Some(1)));
        let chain: Vec<_> =
            filters.all.iter().map(|filter| (filter.program[0], filter.previous, filter.logs)).collect();
        assert_eq!(chain, [(1, None, true), (2, Some(0), false), (3, Some(1), false)]);
    }

    #[test]
    fn a_thread_that_is_not_confined_has_no_filter() {
        let mut filters = FilterTable::default();
        assert_eq!(filters.insert(&Seccomp { mode: 0, filters: Vec::new() }).unwrap(), (0, None));
        assert_eq!(filters.insert(&Seccomp { mode: 1, filters: Vec::new() }).unwrap(), (1, None));
        assert!(filters.insert(&Seccomp { mode: 2, filters: Vec::new() }).is_err());
        let listened = Found { is_listened_to: true, ..found(9) };
        let refused = filters.insert(&Seccomp { mode: 2, filters: vec![listened] }).unwrap_err();
        assert!(refused.to_string().contains("another process"), "{refused}");
    }
}
