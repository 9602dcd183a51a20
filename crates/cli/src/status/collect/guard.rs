//! Guards, by their processes: a guard answers no questions about itself.

use anyhow::Result;

use super::describe::describe;
use super::processes::{Processes, Role};
use crate::status::model::{Item, Kind};

pub(super) fn all(processes: &Processes) -> Result<Vec<Item>> {
    let items = processes.roots(Role::Guard).map(|root| {
        let pid = root.facts.pid;
        let program = processes.children(pid).map(|child| child.name.as_str()).next();
        let state = if program.is_some() { "guards" } else { "starting" };
        let mut item = Item::new(Kind::Guard, program.unwrap_or("orrery guard"), state);
        let help = "Processes that the guard has started itself.";
        item.figures.add("processes", processes.children(pid).count(), help);
        describe(&mut item, Some(pid), processes);
        item
    });
    Ok(items.collect())
}
