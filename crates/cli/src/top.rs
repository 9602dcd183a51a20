//! `orrery top`: a live view of what `orrery status` shows.
//!
//! Three threads send messages to the one that draws: one takes a status at each interval, one reads keys, one waits for signals. So nothing
//! is drawn, and no processor time used, while nothing happens.

mod draw;
mod view;

use std::io::{self, IsTerminal as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEvent};

use crate::status::Selected;
use crate::status::collect::Collector;
use crate::status::model::Status;
use view::{Next, View};

/// Show what of Orrery's runs on this machine, live
///
/// Keys: arrows or j and k move, Tab selects a kind, p pauses, ? shows the keys, q or Esc quits.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    selected: Selected,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    interval: f64,
}

fn interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("choose 0.1 to 3600 seconds".to_owned()),
    }
}

/// What the drawing thread waits for.
enum Message {
    Status(Box<Status>),
    Key(KeyEvent),
    /// The terminal has another size.
    Resized,
    /// A signal asks for the end.
    End,
    /// Keys cannot be read any more.
    Failed(io::Error),
}

/// Shows the view until a key or a signal ends it.
///
/// # Errors
/// Standard output is no terminal; those of the terminal.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    if !io::stdout().is_terminal() {
        bail!("cannot show a live view: standard output is no terminal; use `orrery status`");
    }
    let selection = arguments.selected.selection()?;
    let view = View::new(selection.kinds.clone());
    let (sender, receiver) = channel();
    let signalled = sender.clone();
    ctrlc::set_handler(move || drop(signalled.send(Message::End))).context("cannot wait for signals")?;
    // From here on the terminal is restored: below, and where this process panics, by a hook.
    let terminal = ratatui::try_init().context("cannot set up the terminal")?;
    let paused = Arc::new(AtomicBool::new(false));
    let pause = Duration::from_secs_f64(arguments.interval);
    let started = start_threads(Collector::new(selection), pause, &paused, &sender);
    let shown =
        started.context("cannot start a thread").and_then(|()| show(terminal, view, &receiver, &paused));
    ratatui::try_restore().context("cannot restore the terminal")?;
    shown
}

fn start_threads(
    mut collector: Collector,
    pause: Duration,
    paused: &Arc<AtomicBool>,
    sender: &Sender<Message>,
) -> io::Result<()> {
    let (statuses, paused) = (sender.clone(), Arc::clone(paused));
    let take = move || {
        loop {
            if !paused.load(Ordering::Relaxed)
                && statuses.send(Message::Status(Box::new(collector.take()))).is_err()
            {
                return;
            }
            std::thread::sleep(pause);
        }
    };
    std::thread::Builder::new().name("status".to_owned()).spawn(take)?;
    let keys = sender.clone();
    let read = move || {
        loop {
            let message = match event::read() {
                Ok(Event::Key(key)) => Message::Key(key),
                Ok(Event::Resize(..)) => Message::Resized,
                Ok(_) => continue,
                Err(error) => Message::Failed(error),
            };
            let is_last = matches!(message, Message::Failed(_));
            if keys.send(message).is_err() || is_last {
                return;
            }
        }
    };
    std::thread::Builder::new().name("keys".to_owned()).spawn(read)?;
    Ok(())
}

fn show(
    mut terminal: DefaultTerminal,
    mut view: View,
    messages: &Receiver<Message>,
    paused: &AtomicBool,
) -> Result<()> {
    loop {
        terminal.draw(|frame| draw::draw(frame, &view)).context("cannot write to the terminal")?;
        match messages.recv() {
            Ok(Message::Status(status)) => view.update(*status),
            Ok(Message::Key(key)) => {
                if view.press(key) == Next::Quit {
                    return Ok(());
                }
                paused.store(view.is_paused(), Ordering::Relaxed);
            }
            Ok(Message::Resized) => {}
            Ok(Message::End) | Err(_) => return Ok(()),
            Ok(Message::Failed(error)) => return Err(error).context("cannot read keys"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_bounded() {
        assert_eq!(interval("0.5"), Ok(0.5));
        for bad in ["", "0", "-1", "1e9", "NaN", "1s"] {
            assert!(interval(bad).is_err(), "{bad}");
        }
    }
}
