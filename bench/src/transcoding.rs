//! Copies of ffmpeg that encode all the time, and what they do and take from second to second.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use orrery_report::series::{Density, DensityPoint};

use crate::copies::{Running, terminate_with_parent};
use crate::ffmpeg::{encode, frames_of};
use crate::trees::{Copies, Trees, Way, mib};

/// How long a copy may take to start, among all the others.
const TIMEOUT: Duration = Duration::from_secs(600);

/// Starts ffmpeg, whose frames are counted.
///
/// # Errors
/// It does not start, or encodes nothing.
pub fn film(command: &mut Command, frames: &Arc<AtomicU64>) -> Result<Running> {
    // For ever.
    command.args(encode("size=320x180:rate=30", &["mpeg4"])).stdin(Stdio::null()).stdout(Stdio::piped());
    terminate_with_parent(command);
    let mut child = Running(command.spawn().with_context(|| format!("cannot start {command:?}"))?);
    let mut lines = BufReader::new(child.0.stdout.take().context("no output")?).lines();
    let frames = Arc::clone(frames);
    let (ready, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut before = 0;
        while let Some(Ok(line)) = lines.next() {
            let Some(now) = frames_of(&line) else { continue };
            frames.fetch_add(now.saturating_sub(before), Ordering::Relaxed);
            before = now;
            let _ = ready.send(());
        }
    });
    wait.recv_timeout(TIMEOUT).context("ffmpeg encodes nothing")?;
    Ok(child)
}

/// Watches `count` copies for some seconds. `machine` is the memory of the machine that they are taken to be on, in MiB: of that a tuned
/// KSM finds so much free as they leave.
///
/// # Errors
/// A copy fails, or [`Skipped`](crate::Skipped) where the way is not to be had here.
pub fn watch(trees: &Trees, way: Way, count: usize, seconds: u64, machine: f64) -> Result<Density> {
    let frames = Arc::new(AtomicU64::new(0));
    let mut copies = Copies::start(trees, way, count, |command| film(command, &frames))?;
    let mut points = Vec::new();
    let begin = Instant::now();
    let (mut last, mut counted) = (begin, frames.load(Ordering::Relaxed));
    let mut had = copies.processor_time()?;
    while begin.elapsed() < Duration::from_secs(seconds) {
        std::thread::sleep(Duration::from_secs(1));
        let now = frames.load(Ordering::Relaxed);
        let have = copies.processor_time()?;
        #[expect(clippy::cast_precision_loss, reason = "frames of some seconds")]
        let done = (now - counted) as f64;
        let (rate, of_processor) = (done / last.elapsed().as_secs_f64(), done / (have - had).max(0.01));
        (last, counted, had) = (Instant::now(), now, have);
        let memory = mib(copies.everything()?);
        copies.tune(1.0 - memory / machine)?;
        points.push(DensityPoint {
            second: begin.elapsed().as_secs_f64(),
            memory_mib: memory,
            frames_per_second: rate,
            frames_per_processor_second: of_processor,
        });
    }
    Ok(Density { program: String::new(), contender: way.name().to_owned(), copies: count, points })
}
