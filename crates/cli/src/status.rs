//! `orrery status`: everything of Orrery's that runs on this machine.

pub(crate) mod collect;
pub(crate) mod model;
mod prometheus;
#[cfg(test)]
pub(crate) mod samples;
pub(crate) mod table;
pub(crate) mod text;

use std::io::{self, Write as _};
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum as _};

use collect::{Collector, Selection};
use model::{Kind, Status, Unreadable};

/// Show what of Orrery's runs on this machine: servers, stores, managers, pairs, orbits, vaults, guards
///
/// Only what this user may inspect is shown; root sees everything. Nothing is changed. A server that does not answer within a
/// second is listed as such. The exit status is 0 whatever was found, unless --check is given.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    selected: Selected,
    /// Print JSON, whose keys stay the same from release to release
    #[arg(long)]
    json: bool,
    /// Print metrics in Prometheus' text format
    #[arg(long, conflicts_with = "json")]
    prometheus: bool,
    /// Exit with status 1 if a server of --socket does not answer; without --socket, if nothing runs or something does not answer
    #[arg(long)]
    check: bool,
}

/// What to show; the same for `orrery top`.
#[derive(Args)]
pub(crate) struct Selected {
    /// Show this kind only; may be given several times
    #[arg(long = "kind", value_name = "KIND", value_enum)]
    kinds: Vec<Kind>,
    /// Ask the server at this socket, too; for orc and orthros, the directory; for http, ADDRESS:PORT. Needed where neither the default
    /// place nor /proc leads to it
    #[arg(long = "socket", value_name = "KIND=PATH", value_parser = place)]
    sockets: Vec<(Kind, PathBuf)>,
}

fn place(text: &str) -> Result<(Kind, PathBuf), String> {
    let (kind, path) = text.split_once('=').ok_or("a socket is written KIND=PATH")?;
    let kind = Kind::from_str(kind, false)?;
    match kind {
        Kind::Orbit | Kind::Vault | Kind::Guard => Err(format!("the kind {} has no sockets", kind.word())),
        Kind::Http => collect::check_address(path).map(|()| (kind, path.into())),
        _ if path.is_empty() => Err("a socket is written KIND=PATH".to_owned()),
        _ => Ok((kind, path.into())),
    }
}

impl Selected {
    /// Returns the selection.
    ///
    /// # Errors
    /// A socket of a kind that is not selected.
    pub(crate) fn selection(&self) -> Result<Selection> {
        let mut kinds = Kind::ALL.to_vec();
        kinds.retain(|kind| self.kinds.is_empty() || self.kinds.contains(kind));
        if let Some((kind, path)) = self.sockets.iter().find(|(kind, _)| !kinds.contains(kind)) {
            let word = kind.word();
            bail!(
                "cannot ask --socket {word}={}: the kind is not selected; add --kind {word}",
                path.display()
            );
        }
        Ok(Selection { kinds, sockets: self.sockets.clone() })
    }
}

/// Prints the status.
///
/// # Errors
/// Those of writing to standard output, and options that contradict one another.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let selection = arguments.selected.selection()?;
    let kinds = selection.kinds.clone();
    let status = Collector::new(selection.clone()).take();
    let text = if arguments.json {
        serde_json::to_string_pretty(&status)? + "\n"
    } else if arguments.prometheus {
        prometheus::of(&status, &kinds)
    } else {
        table::of(&status, &kinds) + "\n"
    };
    let mut output = io::stdout().lock();
    output
        .write_all(text.as_bytes())
        .and_then(|()| output.flush())
        .context("cannot write to standard output")?;
    if arguments.check { check(&status, &selection.sockets) } else { Ok(()) }
}

/// Fails unless each server of `sockets` has answered; if there are none, unless something has and nothing has not.
fn check(status: &Status, sockets: &[(Kind, PathBuf)]) -> Result<()> {
    let names: Vec<_> =
        sockets.iter().map(|(kind, path)| (*kind, collect::name_of(*kind, path.clone()))).collect();
    let is_meant = |silent: &&Unreadable| {
        names.is_empty() || names.iter().any(|(kind, name)| *kind == silent.kind && *name == silent.name)
    };
    if let Some(silent) = status.unreadable.iter().find(is_meant) {
        bail!("cannot ask {} {}: {}", silent.kind.word(), silent.name, silent.reason);
    }
    if names.is_empty() && status.items.is_empty() {
        bail!("nothing of Orrery's was found running; name a server with --socket KIND=PATH");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_of_kinds_that_have_some() {
        assert_eq!(place("orc=/run/a=b"), Ok((Kind::Orc, "/run/a=b".into())));
        assert_eq!(place("http=[::1]:80/up"), Ok((Kind::Http, "[::1]:80/up".into())));
        for bad in [
            "http=/run/x",
            "http=localhost:80",
            "http=",
            "",
            "orc",
            "orc=",
            "=x",
            "guard=/x",
            "vault=/x",
            "orbit=/x",
            "Orc=/x",
            "other=/x",
        ] {
            assert!(place(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_check_fails_for_what_does_not_answer() {
        let silent = |kind, name: &str| Unreadable { kind, name: name.to_owned(), reason: "gone".to_owned() };
        let status = |unreadable: Vec<Unreadable>| Status::of(Vec::new(), unreadable);
        let named = [(Kind::Warm, PathBuf::from("/absent/warm"))];
        let error =
            |status: &Status, sockets: &[_]| check(status, sockets).map_err(|error| error.to_string());
        let both = status(vec![silent(Kind::Orc, "/absent/warm"), silent(Kind::Warm, "/absent/warm")]);
        assert_eq!(error(&both, &named), Err("cannot ask warm /absent/warm: gone".to_owned()));
        assert!(error(&both, &[]).unwrap_err().starts_with("cannot ask warm"), "whatever it is");
        let other = status(vec![silent(Kind::Orc, "/absent/warm"), silent(Kind::Warm, "/absent/other")]);
        assert_eq!(error(&other, &named), Ok(()), "others are not meant");
        let nothing = status(Vec::new());
        assert!(error(&nothing, &[]).unwrap_err().contains("nothing"), "nothing runs");
        assert_eq!(error(&nothing, &named), Ok(()), "what was asked has answered");
    }

    #[test]
    fn kinds_are_selected() {
        let selected = |kinds: &[Kind], sockets: &[(Kind, PathBuf)]| {
            Selected { kinds: kinds.to_vec(), sockets: sockets.to_vec() }.selection()
        };
        assert_eq!(selected(&[], &[]).unwrap().kinds, Kind::ALL);
        assert_eq!(selected(&[Kind::Guard, Kind::Warm], &[]).unwrap().kinds, [Kind::Warm, Kind::Guard]);
        let error = selected(&[Kind::Guard], &[(Kind::Orc, "/x".into())]).unwrap_err().to_string();
        assert_eq!(error, "cannot ask --socket orc=/x: the kind is not selected; add --kind orc");
    }
}
