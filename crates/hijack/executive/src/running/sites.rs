//! Where calls come from, and how often.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use super::count::board;
use super::gates::ORRERY_CONFIG;
use super::own;
use super::patch::{self, Outcome};

const SITES: usize = 4096;
/// How many places a site may have: where all are taken, it is not counted, and stays with dispatch.
const PROBES: usize = 8;
/// This many hits mean: not to be rewritten.
const REFUSED: u32 = u32::MAX;

struct Site {
    /// The address behind the call instruction; zero where free.
    address: AtomicU64,
    hits: AtomicU32,
}

static SITES_SEEN: [Site; SITES] =
    [const { Site { address: AtomicU64::new(0), hits: AtomicU32::new(0) } }; SITES];

fn find(address: u64) -> Option<&'static Site> {
    let hash = (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize;
    (0..PROBES).find_map(|probe| {
        let site = SITES_SEEN.get((hash + probe) % SITES)?;
        match site.address.load(Relaxed) {
            0 => match site.address.compare_exchange(0, address, Relaxed, Relaxed) {
                Ok(_) => Some(site),
                Err(other) => (other == address).then_some(site),
            },
            other => (other == address).then_some(site),
        }
    })
}

/// A call was dispatched that came from before `address`. When it is one too many, has the site rewritten.
pub(crate) fn note(address: u64, number: u64) {
    let threshold = ORRERY_CONFIG.threshold.load(Relaxed);
    if ORRERY_CONFIG.unpatched.load(Relaxed) != 0 || ORRERY_CONFIG.filtered.load(Relaxed) != 0 {
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
    match patch::rewrite(address, number) {
        // Should the site be dispatched again, it is another one: its file was unmapped.
        Outcome::Done => {
            site.hits.store(0, Relaxed);
            own::claim();
            board().patched_sites.fetch_add(1, Relaxed);
        }
        Outcome::Refused => {
            site.hits.store(REFUSED, Relaxed);
            board().refused_sites.fetch_add(1, Relaxed);
        }
        Outcome::Later => site.hits.store(0, Relaxed),
    }
}
