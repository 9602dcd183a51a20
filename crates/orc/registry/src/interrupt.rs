//! SIGINT and SIGTERM: they end the program at once, as nothing of what it writes has a name before it is whole, except while it makes a
//! tree, which takes no request to a registry.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};

/// Whether the tree is made, locked while it is being made.
static IS_MADE: Mutex<bool> = Mutex::new(false);

/// The exit status of a program that SIGINT ended, as shells have it.
const INTERRUPTED: i32 = 130;

enum Event {
    Done(Result<()>),
    Interrupted,
}

/// Does work in a thread, and returns its result, or ends the process when it is interrupted.
///
/// # Errors
/// Those of the work, and where signals cannot be handled.
pub(crate) fn run(work: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
    let (send, receive): (Sender<Event>, Receiver<Event>) = channel();
    let interrupted = send.clone();
    ctrlc::set_handler(move || {
        let _ = interrupted.send(Event::Interrupted);
    })
    .context("cannot handle signals")?;
    std::thread::spawn(move || {
        let _ = send.send(Event::Done(work()));
    });
    loop {
        match receive.recv().context("the work has ended without a result")? {
            Event::Done(result) => return result,
            Event::Interrupted => {
                let is_made = IS_MADE.lock().unwrap_or_else(PoisonError::into_inner);
                // It is printed, then.
                if !*is_made {
                    eprintln!("orrery-orc-registry: interrupted; what was fetched whole is kept");
                    std::process::exit(INTERRUPTED);
                }
            }
        }
    }
}

/// Makes a tree, which an interruption does not end.
pub(crate) fn uninterrupted<T, E>(make: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let mut is_made = IS_MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let made = make();
    *is_made = true;
    made
}
