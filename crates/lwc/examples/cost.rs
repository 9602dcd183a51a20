//! What a run costs in this process: `cargo run --release -p orrery-lwc --example cost [MiB]`.

use std::time::Instant;

use orrery_lwc::rollback::Rollback;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mebibytes: usize = std::env::args().nth(1).map_or(Ok(64), |n| n.parse())?;
    let mut memory = vec![1_u8; mebibytes << 20];
    let mut rollback = Rollback::builder().build()?;
    rollback.run(|| {})?;
    println!("{:?}, {mebibytes} MiB", rollback.mechanisms()?);
    let cases = std::env::args().nth(2).map_or(Ok(vec![0, 1, 100, 1000]), |n| n.parse().map(|n| vec![n]))?;
    for pages in cases {
        let mut times: Vec<f64> = (0..5000)
            .map(|_| {
                let begun = Instant::now();
                let outcome = rollback.run(|| {
                    for page in 0..pages {
                        memory[(page * (mebibytes << 20) / 1000) & !4095] = 2;
                    }
                });
                let time = begun.elapsed().as_secs_f64() * 1e6;
                outcome.map(|_| time)
            })
            .collect::<Result<_, _>>()?;
        times.sort_by(f64::total_cmp);
        println!("{pages:5} pages: median {:8.1} us, best {:8.1} us", times[times.len() / 2], times[0]);
    }
    Ok(())
}
