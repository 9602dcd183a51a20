//! Copies of a program that run, each from a file tree of its own, and the ways in which they share memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::content_store::ContentStore;
use crate::copies::{
    Ksm, Running, Store, TunedKsm, anonymous, cached, copy_in_tree, create_tree, drop_caches, files_of,
    processor_time, relocated,
};
use crate::instances::program;
use crate::machine;

/// How the trees and the programs are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Each from a tree of its own.
    Plain,
    /// KSM as most machines have it: 100 pages each 20 ms.
    KsmOn,
    /// KSM that scans all memory about every second.
    KsmFast,
    /// KSM as ksmtuned(1) sets it, and as the paper's: a look each 60 s, and scans where less than 20% of the memory is free.
    KsmTuned,
    /// Trees of hard links to the same files.
    HardLinks,
    /// Trees that are overlays of a content store, as composefs makes them.
    ContentStore,
    /// Through a store whose objects are in memory.
    Orc,
    /// Through a store whose objects are on disk.
    OrcDisk,
    /// One process, with an instance of the program, which was built with the pass, in place of each copy.
    Instances,
}

impl Way {
    /// Returns what it is called in tables and plots.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::KsmOn => "KSM",
            Self::KsmFast => "KSM, fast",
            Self::KsmTuned => "KSM, tuned",
            Self::HardLinks => "hard links",
            Self::ContentStore => "content store",
            Self::Orc => "ours, without --disk",
            Self::OrcDisk => "ours",
            Self::Instances => "instances",
        }
    }

    /// Configures KSM: with the kernel's defaults, or to scan all memory about every second.
    fn ksm(self) -> Result<Option<Ksm>> {
        match self {
            Self::KsmOn => Ksm::at_work(100, 20).map(Some),
            Self::KsmFast => Ksm::at_work(5000, 10).map(Some),
            _ => Ok(None),
        }
    }
}

/// Trees with copies of a program.
#[derive(Debug)]
pub struct Trees {
    directory: tempfile::TempDir,
    files: Vec<PathBuf>,
    program: PathBuf,
    own: Vec<PathBuf>,
    /// The program as a library that was built with the pass.
    library: Option<PathBuf>,
}

impl Trees {
    /// Creates `count` trees with the program and the libraries that it has loaded when `start` returns.
    ///
    /// # Errors
    /// The program does not start, or a tree cannot be written.
    pub fn new(
        program: &Path,
        count: usize,
        start: impl Fn(&mut Command) -> Result<Running>,
    ) -> Result<Self> {
        let files = files_of(start(&mut Command::new(program))?.pid())?;
        // Not in /tmp, which may be memory itself.
        let directory = tempfile::tempdir_in(machine::program_directory()?)?;
        let own: Vec<_> = (0..count).map(|number| directory.path().join(format!("own{number}"))).collect();
        for tree in &own {
            create_tree(tree, &files, None)?;
        }
        Ok(Self { directory, files, program: fs::canonicalize(program)?, own, library: None })
    }

    /// Sets the library whose instances take the place of copies in [`Way::Instances`].
    #[must_use]
    pub fn with_library(self, library: Option<PathBuf>) -> Self {
        Self { library, ..self }
    }

    /// Returns the trees for `count` copies, and the content store that must live as long as they are used.
    fn of(&self, way: Way, count: usize) -> Result<(Vec<PathBuf>, Option<ContentStore>)> {
        let named = |kind: &str, count: usize| -> Vec<PathBuf> {
            (0..count).map(|number| self.directory.path().join(format!("{kind}{number}"))).collect()
        };
        Ok(match way {
            Way::HardLinks => {
                let trees = named("linked", count);
                for tree in trees.iter().filter(|tree| !tree.exists()) {
                    create_tree(tree, &self.files, self.own.first().map(PathBuf::as_path))?;
                }
                (trees, None)
            }
            Way::ContentStore => {
                let trees = named("overlay", count);
                let store = ContentStore::create_tree(self.directory.path(), &trees, &self.files)?;
                (trees, Some(store))
            }
            Way::Instances => {
                let trees = named("instances", 1);
                let library = self.library.clone().context("the program was not built with the pass")?;
                for tree in trees.iter().filter(|tree| !tree.exists()) {
                    create_tree(tree, &[program::host()?, library.clone()], None)?;
                    // With the C library, which the copies have in their trees, too.
                    let shared: Vec<_> =
                        self.files.iter().filter(|file| **file != self.program).cloned().collect();
                    create_tree(tree, &shared, None)?;
                }
                (trees, None)
            }
            _ => (self.own[..count].to_vec(), None),
        })
    }

    /// Returns the command that starts a copy from a tree; of instances, the one process that has all of them.
    fn command(&self, way: Way, count: usize, tree: &Path) -> Result<Command> {
        if way != Way::Instances {
            return Ok(Command::new(copy_in_tree(tree, &self.program)));
        }
        let library = self.library.as_deref().context("the program was not built with the pass")?;
        let host = copy_in_tree(tree, &program::host()?);
        Ok(program::command(&host, &copy_in_tree(tree, library), count))
    }
}

/// Copies of a program that run.
#[derive(Debug)]
pub struct Copies {
    /// Where the bytes of files lie.
    trees: Vec<PathBuf>,
    // In this order they end.
    running: Vec<Running>,
    store: Option<Store>,
    tuned: Option<TunedKsm>,
    _ksm: Option<Ksm>,
    _content: Option<ContentStore>,
}

impl Copies {
    /// Starts `count` copies, one after the other, each by `start`.
    ///
    /// # Errors
    /// One cannot be started, or [`Skipped`](crate::Skipped) where the way is not to be had here.
    pub fn start(
        trees: &Trees,
        way: Way,
        count: usize,
        start: impl Fn(&mut Command) -> Result<Running>,
    ) -> Result<Self> {
        let (roots, content) = trees.of(way, count)?;
        let lie_in = content.as_ref().map_or(roots.clone(), |content| vec![content.store().to_owned()]);
        drop_caches(&lie_in)?;
        let store = match way {
            Way::Orc | Way::OrcDisk => Some(Store::start(way == Way::OrcDisk)?),
            _ => None,
        };
        let tuned = if way == Way::KsmTuned { Some(TunedKsm::new()?) } else { None };
        let ksm = way.ksm()?;
        let mut copies =
            Self { trees: lie_in, running: Vec::new(), store, tuned, _ksm: ksm, _content: content };
        for tree in &roots {
            let mut command = trees.command(way, count, tree)?;
            command.env("LD_LIBRARY_PATH", tree).env("PYTHONPATH", tree).env("PYTHONHOME", "/usr");
            if let Some(store) = &copies.store {
                store.share(&mut command)?;
            }
            if copies._ksm.is_some() || copies.tuned.is_some() {
                Ksm::merge(&mut command);
            }
            copies.running.push(start(&mut command)?);
        }
        Ok(copies)
    }

    /// Has a tuned KSM look at how much memory is free of the machine that they are on.
    ///
    /// # Errors
    /// KSM cannot be set.
    pub fn tune(&mut self, free: f64) -> Result<()> {
        self.tuned.as_mut().map_or(Ok(()), |tuned| tuned.look(free))
    }

    /// Returns the bytes of code and read-only data, after the store has freed what no process needs.
    ///
    /// # Errors
    /// A copy has ended, or the store does not answer.
    pub fn read_only(&self) -> Result<u64> {
        if self.store.is_some() {
            std::thread::sleep(Duration::from_secs(5));
        }
        let own: u64 = self.running.iter().map(|copy| relocated(copy.pid())).sum::<Result<_>>()?;
        Ok(self.files()? + own)
    }

    /// Returns the bytes of everything.
    ///
    /// # Errors
    /// A copy has ended, or the store does not answer.
    pub fn everything(&self) -> Result<u64> {
        let own: u64 = self.running.iter().map(|copy| anonymous(copy.pid())).sum::<Result<_>>()?;
        Ok(self.files()? + own)
    }

    /// Returns the seconds of CPU time of all copies together.
    ///
    /// # Errors
    /// A copy has ended.
    pub fn processor_time(&self) -> Result<f64> {
        self.running.iter().map(|copy| processor_time(copy.pid())).sum()
    }

    fn files(&self) -> Result<u64> {
        Ok(cached(&self.trees)? + self.store.as_ref().map_or(Ok(0), Store::bytes)?)
    }
}

/// Returns bytes as MiB.
#[expect(clippy::cast_precision_loss, reason = "sizes for people")]
#[must_use]
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / 1_048_576.0
}
