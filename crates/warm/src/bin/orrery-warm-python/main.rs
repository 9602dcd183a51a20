//! A worker process: CPython kept warm. Started by `orrery warm serve`, never by hand.
//!
//! The only program here that links libpython. [`interpreter`] starts and warms it; for each request [`request`] does
//! what `python3` does between start and end, [`finish`] what it does at the end. [`environment`] and [`streams`] are
//! parts of a request's beginning; [`pools`] and [`heap`] see to it that a request writes to few pages, since every one
//! has to be restored. [`object`] makes CPython's C interface safe, [`cpython`] declares what is missing from it.

mod cpython;
mod environment;
mod finish;
mod heap;
mod interpreter;
mod object;
mod openssl;
mod pools;
mod request;
mod streams;

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, RawFd};

use anyhow::{Context, bail};
use orrery_warm::config::WorkerConfig;
use orrery_warm::status::StatusPage;
use orrery_warm::worker::sandbox::Protections;
use orrery_warm::{descriptors, worker};

fn main() {
    if let Err(error) = run() {
        eprintln!("orrery: warm: worker {}: {error:#}", std::process::id());
        let spoiled = error.downcast_ref::<worker::WorkerError>();
        let spoiled = spoiled.is_some_and(|error| matches!(error, worker::WorkerError::Spoiled(_)));
        std::process::exit(if spoiled { orrery_warm::server::EXIT_SPOILED } else { 1 });
    }
}

fn run() -> anyhow::Result<()> {
    let arguments: Vec<RawFd> =
        std::env::args().skip(1).map_while(|argument| argument.parse().ok()).collect();
    let [listener, page, config, master] = arguments[..] else {
        bail!("this program is started by `orrery warm serve`, which passes it what it needs");
    };
    if rustix::process::getppid().is_none_or(|parent| parent.as_raw_nonzero().get() != master) {
        bail!("the master has ended already");
    }
    // SAFETY: the master passed it under this number, and nothing else takes it.
    let listener = unsafe { descriptors::inherited(listener) }.context("the listening socket")?;
    let page = {
        // SAFETY: the master passed it under this number, and nothing else takes it.
        let fd = unsafe { descriptors::inherited(page) }.context("the status page")?;
        StatusPage::open(fd.as_fd()).context("the status page")?
    };
    let config = read_config(config)?;
    let protections = match &config.sandbox {
        Some(sandbox) => worker::sandbox::enter_namespaces(sandbox).context("cannot build the sandbox")?,
        None => Protections::default(),
    };
    forget_signals();
    let python = interpreter::Python::start(&config.interpreter)?;
    python.settle();
    worker::serve(&listener, &page, &config, protections, &python)?;
    Ok(())
}

/// Lets every signal have its default action again: what the server's surroundings ignore, and what Rust's runtime
/// catches, is nothing that a script should meet.
fn forget_signals() {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: a signal number and the default action; SIGKILL, SIGSTOP and the C library's own are refused.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let none = libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
    // SAFETY: the structure is a live local. Without the handlers nothing uses the runtime's alternate stack.
    unsafe { libc::sigaltstack(&raw const none, std::ptr::null_mut()) };
}

fn read_config(fd: RawFd) -> anyhow::Result<WorkerConfig> {
    // SAFETY: the master passed it under this number, and nothing else takes it.
    let fd = unsafe { descriptors::inherited(fd) }.context("the configuration")?;
    let mut bytes = Vec::new();
    File::from(fd).read_to_end(&mut bytes).context("cannot read the configuration")?;
    postcard::from_bytes(&bytes).context("the configuration does not decode")
}
