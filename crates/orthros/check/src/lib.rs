//! Reports which parts of a running service would not survive its kernel, before that dies.
//!
//! Everything is read from `/proc`, so that any process can be checked, in a guest or on a host, without touching it.
//! The report is about this moment: a connection that is just being closed, or an event that has not been read, may be
//! fine a moment later.
//!
//! ```no_run
//! let report = orrery_orthros_check::check(4711)?;
//! for finding in &report.findings {
//!     println!("{}: {} ({})", finding.object, finding.why, finding.way_out);
//! }
//! # Ok::<(), orrery_orthros_check::Error>(())
//! ```

mod descriptors;
mod error;
mod memory;
mod peers;
mod process;
mod processor;
mod report;
mod sockets;

pub use error::{Error, Result};
use report::Findings;
pub use report::{Finding, Report, Verdict};

/// Checks the process `pid` and all its descendants.
///
/// # Errors
///
/// [`Error::NoProcess`]; [`Error::Read`] if it belongs to another user. A process that exits meanwhile is left out.
pub fn check(pid: i32) -> Result<Report> {
    let processes = process::tree(pid)?;
    let descriptors = descriptors::all(&processes, pid)?;
    let mut findings = Findings::new(processes.iter().map(|process| (process.pid, process.name.clone())));
    process::check(&processes, &mut findings);
    process::check_sharing(&processes, &mut findings);
    memory::check(&processes, &mut findings);
    processor::check(&processes, &mut findings);
    descriptors::check(&processes, &descriptors, &mut findings);
    let findings = findings.into_sorted();
    Ok(Report {
        pid,
        processes: processes.len(),
        descriptors: descriptors.len(),
        beyond_guests: processor::beyond_guests(),
        survives: findings.iter().all(|finding| finding.verdict != Verdict::Refused),
        findings,
    })
}
