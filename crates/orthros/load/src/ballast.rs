//! A service with as much of everything as is asked for, for measurements: memory that is its own, open files, threads, and
//! one client that it counts for.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::Path;

use anyhow::{Context as _, Result};

/// Where its files are.
const DIRECTORY: &str = "/data/ballast";
const PORT: u16 = 7;
/// What memory is filled with differs from page to page, so that nothing can take pages for equal.
const PAGE: usize = 4096;

/// What is said to it to have it look at all of its memory.
const ALL: &str = "all";

/// Returns how many pages hold what they were filled with.
fn right(memory: &[u8]) -> usize {
    let is_right = |(number, page): &(usize, &[u8])| {
        page[..8] == number.to_le_bytes() && page[8..].iter().all(|&byte| byte == 1)
    };
    memory.chunks(PAGE).enumerate().filter(is_right).count()
}

/// Holds so many MiB, files and threads, and answers each line with the number of lines so far, and `all` with how
/// many pages of its memory are what they were.
pub(crate) fn run(mib: usize, files: usize, threads: usize) -> Result<()> {
    let mut memory = vec![0_u8; mib << 20];
    for (number, page) in memory.chunks_mut(PAGE).enumerate() {
        page[..8].copy_from_slice(&number.to_le_bytes());
        page[8..].fill(1);
    }
    let directory = Path::new(DIRECTORY);
    let mut held = Vec::new();
    if files > 0 {
        std::fs::create_dir_all(directory).with_context(|| format!("cannot create {DIRECTORY}"))?;
    }
    for number in 0..files {
        let path = directory.join(number.to_string());
        held.push(File::create(&path).with_context(|| format!("cannot create {}", path.display()))?);
    }
    for _ in 0..threads {
        let thread = std::thread::Builder::new().stack_size(64 << 10);
        thread
            .spawn(|| {
                loop {
                    std::thread::park()
                }
            })
            .context("cannot start a thread")?;
    }
    let listener =
        TcpListener::bind(("0.0.0.0", PORT)).with_context(|| format!("cannot listen at {PORT}"))?;
    let mut count = 0_u64;
    loop {
        let (mut client, _) = listener.accept()?;
        client.set_nodelay(true)?;
        for line in BufReader::new(client.try_clone()?).lines() {
            let Ok(line) = line else { break };
            if line == ALL {
                if writeln!(client, "{} of {} pages are right", right(&memory), memory.len() / PAGE).is_err()
                {
                    break;
                }
                continue;
            }
            count += 1;
            // A page that was changed on the way is a wrong answer.
            let page = usize::try_from(count)? % (memory.len() / PAGE).max(1) * PAGE;
            let right = memory.get(page..page + 8).is_none_or(|bytes| bytes == (page / PAGE).to_le_bytes());
            let answer = if right { count } else { 0 };
            if writeln!(client, "{answer}").is_err() {
                break;
            }
        }
    }
}
