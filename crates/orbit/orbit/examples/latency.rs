//! How long a synchronous call takes: `latency [DIRTY PAGES] [MIB] [auto|anywhere]`.
#![expect(clippy::print_stdout, reason = "its purpose")]

use core::alloc::Layout;
use std::time::Instant;

use orrery_orbit::{Area, AreaOptions, Call, Orbit, Placement, Task};

fn main() -> Result<(), orrery_orbit::Error> {
    let mut arguments = std::env::args().skip(1);
    let dirty: usize = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(4);
    let mib: usize = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(1);
    let placement = match arguments.next().as_deref() {
        Some("anywhere") => Placement::Anywhere,
        _ => Placement::Auto,
    };
    let area = Area::new(mib << 20, &AreaOptions::default())?;
    let memory = area.allocate(Layout::from_size_align(mib << 20, 4096).unwrap_or(Layout::new::<u64>()))?;
    let page = |index: usize| memory.as_ptr().wrapping_add(index % (mib << 8) * 4096);
    for index in 0..mib << 8 {
        // SAFETY: the index is taken modulo the block's pages, so the byte is in the block, which nobody else
        // uses.
        unsafe { page(index).write(1) };
    }
    let orbit = Orbit::builder("latency")
        .placement(placement)
        .entry(|task: &mut Task<'_>| i64::from(task.arguments()[0]))
        .create()?;
    let areas = [&area];
    let call = Call::new().areas(&areas).arguments(&[7]);
    orbit.call(&call)?;
    let mut times = Vec::new();
    for round in 0..20_000 {
        for index in 0..dirty {
            // SAFETY: the index is taken modulo the block's pages, so the byte is in the block, which nobody
            // else uses.
            unsafe { page(round + index * 7).write(2) };
        }
        let begin = Instant::now();
        orbit.call(&call)?;
        times.push(begin.elapsed());
    }
    times.sort_unstable();
    if let Ok(seen) = orbit.statistics() {
        println!(
            "mean snapshot: {} ns, {:.1} pages",
            seen.snapshot_nanoseconds / seen.calls,
            f64::from(u32::try_from(seen.snapshot_pages).unwrap_or(0))
                / f64::from(u32::try_from(seen.calls).unwrap_or(1))
        );
    }
    println!("median {:?}, 90 % {:?}, 99 % {:?}", times[10_000], times[18_000], times[19_800]);
    Ok(())
}
