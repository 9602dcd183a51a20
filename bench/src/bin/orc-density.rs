//! `make bench B=orc-density`: memory that the code and read-only data of N copies of a program take, each copy from a file tree of
//! its own, as containers would have.
//!
//! The program is Python with its cryptography and database libraries: some 15 MiB of code. Counted is what is there: the
//! cached pages of the trees' files (mincore(2), each file once, mapped or not), and the store's objects. Hard links are the
//! ideal, as then there is one tree; KSM does not appear, as it never merges pages of files.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use comfy_table::presets::NOTHING;
use comfy_table::{Cell, CellAlignment, Table};
use orrery_bench::{Options, machine};
use orrery_orc::Client;
use orrery_orc::measure::{areas, measure};

const PYTHON: &str = "/usr/bin/python3";
/// What the program loads, and then waits.
const WORK: &str = "import ssl, sqlite3, json, ctypes, decimal, hashlib, lzma, bz2\n\
                    print('ready', flush=True)\nimport sys; sys.stdin.read()";

/// Memory of N copies from N trees
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

/// How the trees and the programs are made.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Plain,
    HardLinks,
    Orc,
}

/// A child that ends with this object.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.0.id()) {
            // SAFETY: a signal to a child of ours that was not waited for.
            unsafe { libc::kill(pid, libc::SIGTERM) };
        }
        let _ = self.0.wait();
    }
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let _ = &arguments.options;
    let quick = std::env::var_os("QUICK").is_some_and(|quick| !quick.is_empty());
    let counts: &[usize] = if quick { &[1, 4] } else { &[1, 2, 4, 8, 16, 32] };
    if !Path::new(PYTHON).exists() {
        println!("SKIPPED: there is no {PYTHON}");
        return Ok(ExitCode::SUCCESS);
    }
    let files = files_of_program()?;
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(["COPIES", "PLAIN", "HARD LINKS", "ORC", "DUPLICATES GONE"]);
    for &count in counts {
        let plain = memory_of(Way::Plain, count, &files)?;
        let ideal = memory_of(Way::HardLinks, count, &files)?;
        let ours = memory_of(Way::Orc, count, &files)?;
        #[expect(clippy::cast_precision_loss, reason = "a percentage for people")]
        let gone = if count == 1 || plain <= ideal {
            "-".to_owned()
        } else {
            format!("{:.1}%", 100.0 * (plain as f64 - ours as f64) / (plain as f64 - ideal as f64))
        };
        #[expect(clippy::cast_precision_loss, reason = "sizes for people")]
        let mib = |bytes: u64| right(format!("{:.1} MiB", bytes as f64 / 1_048_576.0));
        table.add_row([right(count.to_string()), mib(plain), mib(ideal), mib(ours), right(gone)]);
    }
    println!("code and read-only data of N copies of a program from N file trees:");
    println!("{}", table.trim_fmt());
    Ok(ExitCode::SUCCESS)
}

fn right(text: String) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}

fn start(command: &mut Command) -> Result<Running> {
    let mut child = Running(
        command
            .args(["-c", WORK])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start the program")?,
    );
    let mut line = String::new();
    BufReader::new(child.0.stdout.take().context("no output")?).read_line(&mut line)?;
    ensure!(line.trim() == "ready", "the program said {line:?}");
    Ok(child)
}

/// Every file whose code the program maps.
fn files_of_program() -> Result<Vec<PathBuf>> {
    let child = start(&mut Command::new(PYTHON))?;
    let mut files: Vec<PathBuf> = areas(i32::try_from(child.0.id())?)?
        .into_iter()
        .filter(|area| area.access == "r-xp" && area.name.starts_with('/'))
        .map(|area| area.name.into())
        .collect();
    files.sort();
    files.dedup();
    // The kernel takes the loader from where the program says.
    files.retain(|file| !file.to_string_lossy().contains("ld-linux"));
    ensure!(files.len() > 5, "the program maps {} files only", files.len());
    Ok(files)
}

fn name(file: &Path) -> PathBuf {
    file.file_name().map_or_else(|| file.to_owned(), PathBuf::from)
}

/// A tree with its own files, or with links to those of the first.
fn plant(tree: &Path, files: &[PathBuf], first: Option<&Path>) -> Result<()> {
    fs::create_dir_all(tree)?;
    for file in files {
        let to = tree.join(name(file));
        match first {
            Some(first) => fs::hard_link(first.join(name(file)), &to),
            None => fs::copy(file, &to).map(|_| ()),
        }
        .with_context(|| format!("plant {}", to.display()))?;
        let copy = File::open(&to)?;
        copy.sync_all()?;
        // SAFETY: advice about a file of ours.
        unsafe { libc::posix_fadvise(copy.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    }
    Ok(())
}

/// Cached bytes of the trees' files, each file once.
fn cached(trees: &[PathBuf]) -> Result<u64> {
    let mut seen = Vec::new();
    let mut pages = 0_u64;
    for entry in trees.iter().flat_map(fs::read_dir).flatten().flatten() {
        let file = File::open(entry.path())?;
        let found = file.metadata()?;
        if seen.contains(&found.ino()) || found.len() == 0 {
            continue;
        }
        seen.push(found.ino());
        let length = usize::try_from(found.len())?;
        let mut present = vec![0_u8; length.div_ceil(4096)];
        // SAFETY: a mapping of its own, asked about and unmapped again, never read.
        let asked = unsafe {
            let place = libc::mmap(
                core::ptr::null_mut(),
                length,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            );
            ensure!(place != libc::MAP_FAILED, "map {}", entry.path().display());
            let asked = libc::mincore(place, length, present.as_mut_ptr());
            libc::munmap(place, length);
            asked
        };
        ensure!(asked == 0, "mincore: {}", std::io::Error::last_os_error());
        pages += present.iter().map(|page| u64::from(page & 1)).sum::<u64>();
    }
    Ok(pages * 4096)
}

fn memory_of(way: Way, count: usize, files: &[PathBuf]) -> Result<u64> {
    // Not in /tmp, which may be memory itself.
    let folder = tempfile::tempdir_in(machine::program_folder()?)?;
    let trees: Vec<PathBuf> = (0..count).map(|tree| folder.path().join(tree.to_string())).collect();
    for (number, tree) in trees.iter().enumerate() {
        let first = trees.first().filter(|_| way == Way::HardLinks && number > 0);
        plant(tree, files, first.map(PathBuf::as_path))?;
    }
    let orrery = machine::program_folder()?.join("orrery");
    let socket = tempfile::tempdir()?;
    let mut store = None;
    if way == Way::Orc {
        let mut serve = Command::new(&orrery);
        serve.args(["orc", "serve", "--directory"]).arg(socket.path());
        store = Some(Running(serve.stdin(Stdio::null()).spawn().context("start the store")?));
        let begin = Instant::now();
        while Client::connect_to(socket.path()).is_err() {
            if begin.elapsed() > Duration::from_secs(30) {
                bail!("the store does not answer");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let program = files.iter().find(|file| file.starts_with("/usr/bin")).context("no program")?;
    let mut running = Vec::new();
    for tree in &trees {
        let program = tree.join(name(program));
        let mut command = match way {
            Way::Orc => {
                let mut command = Command::new(&orrery);
                command.args(["orc", "run", "--directory"]).arg(socket.path()).arg("--").arg(program);
                command
            }
            _ => Command::new(program),
        };
        command.env("LD_LIBRARY_PATH", tree).env("PYTHONPATH", tree).env("PYTHONHOME", "/usr");
        running.push(start(&mut command)?);
    }
    let mut memory = cached(&trees)?;
    if way == Way::Orc {
        let measured = measure(&Client::connect_to(socket.path())?.report()?)?;
        memory += measured.realms.values().map(|saving| saving.stored).sum::<u64>();
    }
    drop(running);
    drop(store);
    Ok(memory)
}
