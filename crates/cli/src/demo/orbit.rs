//! A program that works, and calls a checker in an orbit all the while, which crashes, hangs and starves.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use orrery_orbit::{Area, AreaOptions, Backoff, Call, Error, Fault, Limits, Orbit, Restart, Task};

use super::picture::heights;
use super::stage::Stage;

/// What the checker does in a phase: its number is the task's argument.
const PHASES: [(&str, u64); 4] =
    [("checks", 0), ("reads through a wild pointer", 1), ("loops for ever", 2), ("takes all memory", 3)];
/// A phase lasts for as many bars.
const BARS: usize = 12;
const BAR: Duration = Duration::from_millis(100);
/// How often the checker is called.
const INTERVAL: Duration = Duration::from_millis(10);
const TIME_LIMIT: Duration = Duration::from_millis(50);
const MEMORY_LIMIT: u64 = 64 << 20;
const WORDS: usize = 4096;

pub(super) fn show(stage: &mut Stage) -> Result<()> {
    let area = Area::new(1 << 20, &AreaOptions::default()).context("cannot make an area")?;
    let layout = std::alloc::Layout::array::<u64>(WORDS).context("cannot lay out the table")?;
    let table = area.allocate(layout).context("cannot allocate the table")?.cast::<u64>().as_ptr();
    let backoff = Backoff {
        first: Duration::from_millis(1),
        longest: Duration::from_millis(1),
        limit: None,
        ..Backoff::default()
    };
    let mut limits = Limits::default();
    limits.memory = Some(MEMORY_LIMIT);
    let checker = Orbit::builder("demo checker")
        .entry(check)
        .restart(Restart::Always(backoff))
        .time_limit(TIME_LIMIT)
        .limits(limits)
        .create()
        .context("cannot create the orbit")?;
    println!("  what the program gets done, a bar each {} ms, while its checker", BAR.as_millis());
    let mut total = 0_u64;
    for (what, phase) in PHASES {
        let mut works = Vec::new();
        let (mut calls, mut faults, mut last) = (0, 0, None);
        let mut pending = None;
        for _ in 0..BARS {
            stage.go_on()?;
            let (begin, mut count) = (Instant::now(), 0_u32);
            while begin.elapsed() < BAR {
                let next = begin.elapsed() + INTERVAL;
                // One call at a time: a checker that hangs is not given more to do.
                if pending.is_none() {
                    let arguments = [phase, table.expose_provenance() as u64].map(u64::to_ne_bytes).concat();
                    let areas = [&area];
                    pending = checker.call_async(&Call::new().areas(&areas).arguments(&arguments)).ok();
                    calls += u32::from(pending.is_some());
                }
                while begin.elapsed() < next {
                    work(table, &mut total);
                    count += 1;
                }
                match pending.as_ref().map(orrery_orbit::Future::try_get) {
                    Some(Ok(None)) | None => continue,
                    Some(Ok(Some(differences))) => {
                        ensure!(differences == 0, "the checker saw a table that never was");
                    }
                    Some(Err(Error::Fault { fault, .. } | Error::NotRun { fault, .. })) => {
                        faults += 1;
                        last = Some(fault);
                    }
                    Some(Err(error)) => return Err(error).context("cannot call the checker"),
                }
                pending = None;
            }
            works.push(f64::from(count));
        }
        println!("  {what:29} {}  {calls} calls, {faults} failed", heights(&works));
        if let Some(fault) = last {
            println!("  {:29} last report: {}", "", brief(&fault));
        }
    }
    let restarts = checker.restarts().context("cannot count the restarts")?;
    println!("\n  {total} updates of the table, none lost; its orbit was restarted {restarts} times");
    Ok(())
}

/// The program's own work: an update of the table, which keeps all its words equal in sum.
fn work(table: *mut u64, total: &mut u64) {
    let at = usize::try_from(*total).unwrap_or(0).wrapping_mul(7919) % WORDS;
    // SAFETY: `at` is below `WORDS`, the length of the table, which lives as long as its area; only this thread writes.
    unsafe { table.add(at).write_volatile(table.add(at).read_volatile() + 1) };
    *total += 1;
}

/// Runs the task, in the orbit.
fn check(task: &mut Task<'_>) -> i64 {
    let arguments = task.arguments();
    let word =
        |at: usize| arguments.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_ne_bytes);
    let (phase, address) = (word(0).unwrap_or(0), word(8).unwrap_or(0));
    let table = std::ptr::with_exposed_provenance::<u64>(usize::try_from(address).unwrap_or(0));
    match phase {
        1 => {
            // SAFETY: none: this crash is what the part shows, and it ends the orbit alone.
            let value = unsafe { std::ptr::with_exposed_provenance::<u64>(64).read_volatile() };
            i64::from(value == 0)
        }
        2 => loop {
            std::hint::spin_loop();
        },
        3 => {
            let mut taken = Vec::new();
            loop {
                taken.push(std::hint::black_box(vec![1_u8; 1 << 20]));
            }
        }
        _ => {
            // SAFETY: main passes its table of `WORDS` words, in an area that the call names.
            let table = unsafe { std::slice::from_raw_parts(table, WORDS) };
            let (least, most) = (table.iter().min().unwrap_or(&0), table.iter().max().unwrap_or(&0));
            // The updates go round the table, so no word is more than one ahead.
            i64::from(most - least > 1)
        }
    }
}

fn brief(fault: &Fault) -> String {
    let text = fault.to_string();
    text.chars().take(100).collect()
}
