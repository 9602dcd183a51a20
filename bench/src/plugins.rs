//! Plug-ins in C++ that a program loads by their paths, and the program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::contender::Skipped;

/// What a plug-in has in place of its number.
const NUMBER: &[u8] = b"NUMBER 00000000";

/// A program and plug-ins, each different from all others.
#[derive(Debug)]
pub struct Plugins {
    host: PathBuf,
    small: Vec<PathBuf>,
    large: Vec<PathBuf>,
}

fn compile(source: &str, options: &[&str], directory: &Path, name: &str) -> Result<PathBuf> {
    let (from, to) = (directory.join(format!("{name}.cc")), directory.join(name));
    fs::write(&from, source)?;
    let mut command = Command::new("c++");
    command.args(["-std=c++17", "-O2"]).args(options).arg("-o").arg(&to).arg(&from).arg("-ldl");
    let status = command.status().map_err(|error| Skipped(format!("there is no C++ compiler: {error}")))?;
    ensure!(status.success(), "{command:?} failed");
    Ok(to)
}

/// Makes `count` files of these bytes that differ in the number that is in them.
fn copies(plugin: &Path, count: usize) -> Result<Vec<PathBuf>> {
    let mut bytes = fs::read(plugin)?;
    let at =
        bytes.windows(NUMBER.len()).position(|window| window == NUMBER).context("no number in a plug-in")?;
    (0..count)
        .map(|number| {
            let path = plugin.with_extension(format!("{number}.so"));
            bytes[at..][..NUMBER.len()].copy_from_slice(format!("NUMBER {number:08}").as_bytes());
            fs::write(&path, &bytes)?;
            Ok(path)
        })
        .collect()
}

impl Plugins {
    /// Builds the program, `small` plug-ins of 28 KiB and `large` ones of 190 KiB in this directory.
    ///
    /// # Errors
    /// [`Skipped`] where there is no C++ compiler; those of compiling and of writing files.
    pub fn build(directory: &Path, small: usize, large: usize) -> Result<Self> {
        let source = include_str!("plugins/plugin.cc");
        let shared = ["-shared", "-fPIC"];
        let small_one = compile(source, &shared, directory, "small")?;
        let large_one = compile(source, &[&shared[..], &["-DLARGE"]].concat(), directory, "large")?;
        Ok(Self {
            // Also where linkers leave out what is not used, it has the C++ library.
            host: compile(include_str!("plugins/host.cc"), &["-Wl,--no-as-needed"], directory, "host")?,
            small: copies(&small_one, small)?,
            large: copies(&large_one, large)?,
        })
    }

    /// Returns the command that loads the first `count` of the small or the large ones.
    pub fn command(&self, is_large: bool, count: usize) -> Command {
        let plugins = if is_large { &self.large } else { &self.small };
        let mut command = Command::new(&self.host);
        command.args(plugins.iter().take(count));
        command
    }

    /// Returns how much CPU time loading took, as the program prints it.
    ///
    /// # Errors
    /// It printed something else.
    pub fn took(output: &str) -> Result<Duration> {
        Ok(Duration::from_nanos(output.trim().parse().context("a number of nanoseconds")?))
    }
}
