//! Seccomp filters, each once, in the order in which they were put on.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Result, bail};
use orrery_kimage::{Seccomp, Task};

use super::object_messages::{Seccomp as Image, SeccompFilter};
use super::writer::{ImageFile, Kind};

const FILTERED: u32 = 2;
/// `SECCOMP_FILTER_FLAG_LOG`.
const LOGS: u32 = 2;

/// The filters of all threads, by their addresses in the kernel.
#[derive(Default)]
pub(super) struct Filters {
    known: HashMap<u64, u32>,
    all: Vec<SeccompFilter>,
}

impl Filters {
    /// How a thread is confined: the mode, and the number of its newest filter.
    pub(super) fn add(&mut self, thread: &Task<'_>) -> Result<(u32, Option<u32>)> {
        self.put(&thread.seccomp()?)
    }

    fn put(&mut self, seccomp: &Seccomp) -> Result<(u32, Option<u32>)> {
        if seccomp.filters.iter().any(|filter| filter.is_listened_to) {
            bail!("another process answers for its seccomp filter, which cannot be carried over");
        }
        let mut prev = None;
        for filter in seccomp.filters.iter().rev() {
            let number = match self.known.get(&filter.address) {
                Some(&known) => known,
                None => {
                    let next = u32::try_from(self.all.len())?;
                    let flags = filter.logs.then_some(LOGS);
                    self.all.push(SeccompFilter { filter: filter.program.clone(), prev, flags });
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

    pub(super) fn write(self, folder: &Path) -> Result<()> {
        let mut image = ImageFile::create(folder, "seccomp", Kind::Seccomp)?;
        if !self.all.is_empty() {
            image.put(&Image { filters: self.all })?;
        }
        image.finish()
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
        let mut filters = Filters::default();
        let parent = Seccomp { mode: 2, filters: vec![found(2), found(1)] };
        let child = Seccomp { mode: 2, filters: vec![found(3), found(2), found(1)] };
        assert_eq!(filters.put(&parent).unwrap(), (2, Some(1)));
        assert_eq!(filters.put(&child).unwrap(), (2, Some(2)));
        assert_eq!(filters.put(&parent).unwrap(), (2, Some(1)));
        let chain: Vec<_> =
            filters.all.iter().map(|filter| (filter.filter[0], filter.prev, filter.flags)).collect();
        assert_eq!(chain, [(1, None, Some(2)), (2, Some(0), None), (3, Some(1), None)]);
    }

    #[test]
    fn who_is_not_confined_has_no_filter() {
        let mut filters = Filters::default();
        assert_eq!(filters.put(&Seccomp { mode: 0, filters: Vec::new() }).unwrap(), (0, None));
        assert_eq!(filters.put(&Seccomp { mode: 1, filters: Vec::new() }).unwrap(), (1, None));
        assert!(filters.put(&Seccomp { mode: 2, filters: Vec::new() }).is_err());
        let listened = Found { is_listened_to: true, ..found(9) };
        let refused = filters.put(&Seccomp { mode: 2, filters: vec![listened] }).unwrap_err();
        assert!(refused.to_string().contains("another process"), "{refused}");
    }
}
