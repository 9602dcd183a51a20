//! Where the manager itself runs: on the CPUs to which the programs with reservations are bound.
//!
//! A priority of what runs on another CPU takes an interrupt there, which on a virtual machine leaves it, and three to five times as long as one of
//! what runs on the manager's own. So the manager binds itself to the CPUs that all of them may run on, while those are not all.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// How many CPUs a mask has; what is bound to later ones counts as bound to none.
const MOST: usize = 128;

/// The CPUs that a process may run on, of the first 128; all where that is not known.
pub(crate) fn affinity(pid: i32) -> u128 {
    let pid = rustix::process::Pid::from_raw(pid);
    sched_getaffinity(pid).map_or(u128::MAX, |set| mask(&set))
}

fn mask(set: &CpuSet) -> u128 {
    (0..MOST).filter(|cpu| set.is_set(*cpu)).fold(0, |mask, cpu| mask | 1 << cpu)
}

/// The CPUs that the manager was given: threads that it makes while it is bound to fewer take these.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OwnCpus(Option<CpuSet>);

impl OwnCpus {
    /// Reads those of the calling thread.
    pub(crate) fn read() -> Self {
        Self(sched_getaffinity(None).ok())
    }

    /// Returns them as a mask; none where they are not known.
    pub(crate) fn mask(&self) -> u128 {
        self.0.as_ref().map_or(0, mask)
    }

    /// Lets the calling thread run on all of them.
    pub(crate) fn take(&self) {
        if let Some(set) = &self.0 {
            // It stays where it is should they not be there any more.
            let _ = sched_setaffinity(None, set);
        }
    }
}

/// On which CPUs the calling thread is, of those that it was given.
#[derive(Debug)]
pub(crate) struct Placement {
    own: OwnCpus,
    /// Those that it is bound to; `None` while it is on all.
    bound: Option<u128>,
}

impl Placement {
    /// Those are what the calling thread was given.
    pub(crate) fn new(own: OwnCpus) -> Self {
        Self { own, bound: None }
    }

    /// Binds the calling thread to the CPUs that are in all of `masks`, or lets it run on all: without masks, where no CPU is in all of
    /// them, and where the kernel refuses.
    pub(super) fn choose(&mut self, masks: impl IntoIterator<Item = u128>) {
        let bound = common(self.own.mask(), masks);
        if bound == self.bound {
            return;
        }
        self.bound = bound;
        let mut set = CpuSet::new();
        if let Some(mask) = bound {
            (0..MOST).filter(|cpu| mask & 1 << cpu != 0).for_each(|cpu| set.set(cpu));
        }
        if bound.is_none() || sched_setaffinity(None, &set).is_err() {
            self.own.take();
        }
    }
}

/// Returns the part of `own` that is in all of `masks`; `None` where that is all of it, or nothing.
fn common(own: u128, masks: impl IntoIterator<Item = u128>) -> Option<u128> {
    let common = masks.into_iter().fold(own, |common, mask| common & mask);
    (common != own && common != 0).then_some(common)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_where_all_of_them_may_run() {
        assert_eq!(common(0b1111, []), None);
        assert_eq!(common(0b1111, [u128::MAX, 0b0110]), Some(0b0110));
        assert_eq!(common(0b1111, [0b0110, 0b1100]), Some(0b0100));
        // One CPU cannot be all of theirs, nor one that it was not given.
        assert_eq!(common(0b1111, [0b0001, 0b1000]), None);
        assert_eq!(common(0b0011, [0b0100]), None);
        assert_eq!(common(0b0011, [0b0111]), None);
    }

    #[test]
    fn a_thread_is_bound_and_let_go() {
        std::thread::spawn(|| {
            let own = OwnCpus::read();
            let last = 1 << (127 - own.mask().leading_zeros());
            let now = || mask(&sched_getaffinity(None).unwrap());
            let mut placement = Placement::new(own);
            placement.choose([last]);
            assert_eq!(now(), last);
            placement.choose([last, u128::MAX]);
            assert_eq!(now(), last);
            placement.choose([]);
            assert_eq!(now(), own.mask());
            placement.choose([last]);
            own.take();
            assert_eq!(now(), own.mask());
        })
        .join()
        .unwrap();
    }
}
