//! What Orrery does, as contenders.

mod first;
mod memory;
mod monitor;
mod orbit;
mod python_process;
mod run;
mod scan;
mod session;
mod switch;
mod tracked;
mod warm;

pub use first::FirstCapture;
pub use memory::RestoredMemory;
pub use monitor::Guarded;
pub use orbit::{OrbitCall, OrbitCreation};
pub use python_process::{InPython, orrery_bench_fork, orrery_bench_run};
pub use run::{Captures, WholeRun};
pub use scan::CleanScan;
pub use session::{ContextLife, PooledSession};
pub use switch::{ContextSwitch, VaultCall};
pub use tracked::TrackedPages;
pub use warm::Warm;

use orrery_memory::space::{Config, Space};
use orrery_memory::tracker::Choice;
use orrery_memory::{Arena, Error, PageRange};

use anyhow::Result;

use crate::contender::Skipped;
use crate::footprint::Footprint;

/// Returns the pages of a footprint.
fn range(footprint: &Footprint) -> PageRange {
    PageRange::covering(footprint.base().addr().get(), footprint.bytes())
}

/// Makes a space of the footprint alone, so that nothing of the harness is rolled back.
fn space(footprint: &Footprint, arena: &'static Arena, config: Config<'_>) -> Result<Space> {
    let scope = [range(footprint)];
    Space::new(arena, Config { scope: Some(&scope), ..config }).map_err(absent)
}

/// Turns the error of a tracker that this kernel does not allow into `Skipped`.
fn absent(error: Error) -> anyhow::Error {
    match error {
        Error::Tracker { .. } => Skipped(error.to_string()).into(),
        other => other.into(),
    }
}

/// The name of a tracker, as `ORRERY_TRACKER` has it.
pub fn tracker_name(choice: Choice) -> &'static str {
    match choice {
        Choice::Auto => "auto",
        Choice::WpAsync => "wp_async",
        Choice::Compare => "compare",
    }
}

#[cfg(test)]
mod tests {
    use orrery_memory::space::First;

    use orrery_memory::images::Visibility;

    use super::*;
    use crate::contender::Contender;
    use crate::footprint::Backing;

    const SIZE: usize = 8 << 20;

    fn footprint() -> Footprint {
        Footprint::anonymous(SIZE, Backing::Small).unwrap()
    }

    /// Each contender itself fails where the memory does not come back, so measuring is the test.
    fn all_do(contender: Result<impl Contender>, works: &[&str], operations: u32) {
        let mut contender = match contender {
            Ok(contender) => contender,
            Err(error) if error.is::<Skipped>() => return println!("{error}"),
            Err(error) => panic!("{error:#}"),
        };
        for work in works {
            let sample = contender.measure(work, 2).unwrap_or_else(|error| panic!("{work}: {error:#}"));
            assert_eq!(sample.iterations, operations, "{work}");
            assert!(!sample.elapsed.is_zero(), "{work}");
        }
        assert!(contender.measure("nonsense", 1).is_err());
    }

    #[test]
    fn restored_memory_comes_back() {
        for visibility in [Visibility::Mapped, Visibility::Hidden] {
            all_do(RestoredMemory::new(footprint(), visibility), &["0", "1", "1000", "10+1000", "10*"], 2);
        }
    }

    #[test]
    fn every_tracker_is_measured() {
        for choice in [Choice::WpAsync, Choice::Compare] {
            all_do(TrackedPages::new(footprint(), choice), &["fault", "restore"], 2000);
            all_do(CleanScan::new(footprint(), choice), &["scan"], 2);
        }
    }

    #[test]
    fn first_captures_start_over_each_time() {
        for first in [First::Auto, First::Copy, First::Fork] {
            all_do(FirstCapture::new(footprint(), first), &["capture", "rollback"], 2);
        }
    }
}
