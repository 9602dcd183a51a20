//! Vaults of servers, by their processes: a vault answers no questions about itself.

use anyhow::Result;

use super::describe::describe;
use super::processes::{Processes, Role};
use crate::status::model::{Item, Kind, Main};

pub(super) fn all(processes: &Processes) -> Result<Vec<Item>> {
    let items = processes.roots(Role::Vault).map(|root| {
        let mut item = Item::new(Kind::Vault, root.facts.name.as_str(), "runs");
        // One whose server was started in the background has a reaper for its parent.
        let main =
            Some(root.facts.parent).filter(|parent| *parent > 1).and_then(|parent| processes.get(parent));
        item.main = main.map(|main| Main { pid: main.pid, name: main.name.clone() });
        item.figures.add("processes", processes.family(root), "Keeper, spare and twins.");
        describe(&mut item, Some(root.facts.pid), processes);
        item
    });
    Ok(items.collect())
}
