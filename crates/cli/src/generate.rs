//! `orrery generate`: manual pages and shell completions, made of the command line's own description.

use std::io::{self, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::{Args, CommandFactory as _, Subcommand};
use clap_complete::Shell;

use crate::Orrery;

/// Make manual pages or a shell's completion of this command
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Write a manual page for each command into a directory
    Man {
        /// The directory, which must exist
        directory: PathBuf,
    },
    /// Print the completion for a shell
    Completion {
        /// The shell
        shell: Shell,
    },
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let mut command = Orrery::command();
    match &arguments.what {
        What::Man { directory } => clap_mangen::generate_to(command.disable_help_subcommand(true), directory)
            .with_context(|| format!("cannot write manual pages into {}", directory.display())),
        What::Completion { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut command, "orrery", &mut text);
            Ok(io::stdout().write_all(&text)?)
        }
    }
}
