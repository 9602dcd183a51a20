//! The verdicts for people: a task a line, and below it what is absent.

use std::fmt::Write as _;
use std::io::IsTerminal as _;

use super::tasks::{State, Verdict};

const FURTHER: &str = "orrery doctor --facts shows each facility that was tried, --check TASK exits with 1 if TASK does not work.";

/// The longest word.
const WORD: usize = "limited".len();

/// Returns the report; `whole` adds what else the command can do.
pub(super) fn of(verdicts: &[Verdict], whole: bool) -> String {
    let colored =
        std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let names = verdicts.iter().map(|verdict| verdict.task.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    // Writing to a string cannot fail.
    for verdict in verdicts {
        let (name, about) = (format!("{}:", verdict.task.name), verdict.task.about);
        let state = painted(verdict.state, colored);
        let width = names + 1;
        match verdict.state {
            State::No => {
                let _ = writeln!(text, "{name:width$} {state} {}", verdict.reasons.join("; "));
            }
            State::Ready | State::Limited => {
                let _ = writeln!(text, "{name:width$} {state} {about}");
                for reason in &verdict.reasons {
                    let _ = writeln!(text, "{:width$} {:WORD$} {reason}", "", "");
                }
            }
        }
    }
    if whole {
        let _ = writeln!(text, "\n{FURTHER}");
    }
    text.truncate(text.trim_end().len());
    text
}

fn painted(state: State, colored: bool) -> String {
    let color = match state {
        State::Ready => 32,
        State::Limited => 33,
        State::No => 31,
    };
    let word = state.word();
    // A task that does not work has the reasons after the word.
    let width = if state == State::No { 0 } else { WORD };
    if colored { format!("\x1b[{color}m{word:width$}\x1b[0m") } else { format!("{word:width$}") }
}
