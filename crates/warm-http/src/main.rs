//! The program that speaks HTTP before a warm server. Users start it with `orrery warm http`.

mod body;
mod connection;
mod health;
mod listen;
mod output;
mod script;
mod serve;
mod service;
mod settings;
mod state;
mod watch;

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser;
use orrery_log as log;
use orrery_warm_http::command::Arguments;

use crate::settings::Settings;

/// Serve HTTP: each request runs as a script of a warm server, by the Common Gateway Interface
#[derive(Parser)]
#[command(name = "orrery-warm-http", version, max_term_width = 120)]
struct CommandLine {
    #[command(flatten)]
    log: log::Options,

    #[command(flatten)]
    arguments: Arguments,
}

fn main() -> ExitCode {
    let line = CommandLine::parse();
    log::start(&line.log);
    match run(&line.arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("orrery-warm-http: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    // While there is one thread: reading the mask sets it, and the passed sockets are announced in the environment.
    let settings = Settings::new(arguments)?;
    let listeners = listen::listeners(arguments.listen)?;
    raise_limit();
    // A request that was given up keeps its thread for some seconds, and another may begin.
    let threads = settings.requests.saturating_mul(2).saturating_add(SPARE_THREADS);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .max_blocking_threads(threads)
        .build()
        .context("cannot start the threads that serve")?;
    let done = runtime.block_on(serve::serve(settings, listeners));
    // What waits for a script that has not ended in time waits no more.
    runtime.shutdown_background();
    done
}

/// Threads beside those that wait for a script each: for files, and for questions about the server's state.
const SPARE_THREADS: usize = 32;

/// Lets this process open as many files as it may: a request takes some ten.
fn raise_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(errno) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!("cannot raise the limit of open files: {errno}; fewer requests are served at a time");
    }
}
