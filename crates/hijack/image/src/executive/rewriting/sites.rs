//! Where calls come from, and how often.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::executive::abi::state::{ORRERY_CONFIG, shared_page};
use crate::executive::abi::thread_counters;
use crate::executive::rewriting::patch;
use crate::executive::rewriting::patch::Outcome;

/// PathBuffer for those of a small program: one page.
const FEW: usize = 256;
/// PathBuffer for all others.
const MANY: usize = 4096;
/// How many places a site may have in either: where all are taken, it is not counted, and stays with dispatch.
const PROBES: usize = 8;
/// This many hits mean: not to be rewritten.
const REFUSED: u32 = u32::MAX;

struct Site {
    /// The address behind the call instruction; zero where free.
    address: AtomicU64,
    hits: AtomicU32,
}

#[repr(align(4096))]
struct Page([Site; FEW]);

impl Site {
    const fn free() -> Self {
        Self { address: AtomicU64::new(0), hits: AtomicU32::new(0) }
    }
}

/// Most programs make calls from a few dozen places, and end. In a large table each of these would be the first on its page,
/// and the page a fault that costs as much as the call.
static SEEN_FIRST: Page = Page([const { Site::free() }; FEW]);
static SEEN: [Site; MANY] = [const { Site::free() }; MANY];

fn find(address: u64) -> Option<&'static Site> {
    let hash = (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize;
    within(&SEEN_FIRST.0, hash, address).or_else(|| within(&SEEN, hash, address))
}

/// The site's place, which it takes if it has none and one is free.
fn within(sites: &'static [Site], hash: usize, address: u64) -> Option<&'static Site> {
    (0..PROBES).find_map(|probe| {
        let site = sites.get((hash + probe) % sites.len())?;
        // Written to at once: to read memory first that was never written to costs a fault more.
        match site.address.compare_exchange(0, address, Relaxed, Relaxed) {
            Ok(_) => Some(site),
            Err(other) => (other == address).then_some(site),
        }
    })
}

/// A call was dispatched that came from before `address`, with this in rax. When it is one too many, has the site rewritten.
#[inline(never)]
pub(crate) fn record(address: u64, made: u64) {
    let threshold = ORRERY_CONFIG.threshold.load(Relaxed);
    if ORRERY_CONFIG.rewriting_disabled.load(Relaxed) != 0 || ORRERY_CONFIG.filtered.load(Relaxed) != 0 {
        return;
    }
    let Some(site) = find(address) else { return };
    let hits = site.hits.load(Relaxed);
    if hits == REFUSED {
        return;
    }
    // Two threads may count one hit: the threshold is no promise.
    site.hits.store(hits + 1, Relaxed);
    if hits + 1 < threshold {
        return;
    }
    match patch::rewrite(address, made) {
        // Should the site be dispatched again, it is another one: its file was unmapped.
        Outcome::Done => {
            site.hits.store(0, Relaxed);
            thread_counters::claim();
            shared_page().patched_sites.fetch_add(1, Relaxed);
        }
        Outcome::Refused => {
            site.hits.store(REFUSED, Relaxed);
            shared_page().refused_sites.fetch_add(1, Relaxed);
        }
        Outcome::Later => site.hits.store(0, Relaxed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sites_keep_their_places() {
        static SITES: [Site; 16] = [const { Site::free() }; 16];
        let place = |address| within(&SITES, 3, address).map(|site| &raw const *site);
        let first = place(0x1000);
        assert!(first.is_some());
        assert_eq!(place(0x1000), first);
        let others: Vec<_> = (1..PROBES as u64).map(|index| place(0x1000 + index)).collect();
        assert!(others.iter().all(|other| other.is_some() && *other != first));
        assert_eq!(place(0x2000), None, "all places are taken");
        assert_eq!(place(0x1000), first);
    }
}
