//! Log messages of programs: the options for their level and format, which `orrery` and `orrery-warm-http` have alike.
//!
//! Libraries emit events of the crate `tracing`; [`start`] has them written to standard error. Messages that belong to a
//! command's result go to standard output or are errors, and are not logged.

use std::io;

use clap::{Args, ValueEnum};
use tracing_subscriber::filter::LevelFilter;

/// Options that every command accepts.
#[derive(Args, Debug)]
pub struct Options {
    /// Log messages of this level and above
    #[arg(long, global = true, value_name = "LEVEL", value_enum, default_value_t = Level::Info, hide_possible_values = false)]
    log_level: Level,

    /// Format of log messages
    #[arg(long, global = true, value_name = "FORMAT", value_enum, default_value_t = Format::Text)]
    log_format: Format,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Level {
    Off,
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// One line per message
    Text,
    /// One JSON object per message
    Json,
}

/// Directs log messages to standard error. Called once, before the command runs.
pub fn start(options: &Options) {
    let level = match options.log_level {
        Level::Off => LevelFilter::OFF,
        Level::Error => LevelFilter::ERROR,
        Level::Warn => LevelFilter::WARN,
        Level::Info => LevelFilter::INFO,
        Level::Debug => LevelFilter::DEBUG,
        Level::Trace => LevelFilter::TRACE,
    };
    let builder = tracing_subscriber::fmt().with_max_level(level).with_writer(io::stderr).with_target(false);
    // A full disk would be reported on standard error, too, and that it cannot be would be a panic: no server ends for its log.
    let builder = builder.log_internal_errors(false);
    match options.log_format {
        // systemd and most log readers add the time themselves.
        Format::Text => builder.without_time().with_ansi(false).init(),
        Format::Json => builder.json().flatten_event(true).init(),
    }
}
