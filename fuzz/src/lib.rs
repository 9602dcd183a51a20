//! Fuzz targets for the parsers of bytes that somebody else may have written.
//!
//! A target is a function of bytes. It panics where the parser breaks what it promises: usually that what was decoded is encoded
//! and decoded to the same value again. The two ways of running it add what holds for all: bounded memory and bounded time.
//!
//! - `fuzz_targets/NAME.rs` hands the function to libFuzzer, which measures coverage (nightly toolchain, cargo-fuzz).
//! - The program `orrery-fuzz` mutates the corpus without feedback, on the toolchain that builds Orrery.

mod targets;

pub use targets::TARGETS;

/// A parser under test.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name of the target, of its corpus and of its file in `fuzz_targets`.
    pub name: &'static str,
    /// Parses the bytes, and panics if a property does not hold.
    pub run: fn(&[u8]),
    /// Inputs that are generated, because they are too large or too many to be committed.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// The longest input that is tried, in bytes.
    pub longest: usize,
}

impl Target {
    const fn new(name: &'static str, run: fn(&[u8])) -> Self {
        Self { name, run, seeds: Vec::new, longest: 4 << 10 }
    }

    const fn with_seeds(self, seeds: fn() -> Vec<Vec<u8>>) -> Self {
        Self { seeds, ..self }
    }

    const fn up_to(self, longest: usize) -> Self {
        Self { longest, ..self }
    }
}

/// Returns the target of this name.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// Runs the target of this name, which exists, on one input of libFuzzer's.
///
/// # Panics
/// If a property does not hold.
pub fn run(name: &str, input: &[u8]) {
    match target(name) {
        Some(target) => (target.run)(input),
        None => panic!("no fuzz target is called {name}"),
    }
}
