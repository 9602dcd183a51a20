//! Where a task stands in the hierarchies of control groups, as `/proc/PID/cgroup` tells it (cgroups(7)).
//!
//! Tasks in the same groups of all hierarchies share a `css_set`, on whose ring hangs one link for each of them. A group's
//! name, and those of the groups around it, are those of its directory. Source: Linux `kernel/cgroup/cgroup.c`.

use crate::error::{Result, Walk};
use crate::list;
use crate::object::Object;
use crate::task::Task;

/// Groups can be nested as deep as their names fit a path.
const DEEPEST: usize = 4096;

/// The group of one hierarchy that a task is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlGroup {
    /// The hierarchy's number; 0 is the unified one, of version 2.
    pub hierarchy: u32,
    /// Which controllers the hierarchy has, one bit for each in the kernel's own order; none in the unified one, whose
    /// groups have each their own.
    pub controllers: u64,
    /// What the hierarchy was called by who mounted it (`-o name=`); mostly nothing.
    pub name: String,
    /// The group, as a path from the hierarchy's root: `/` is the root itself.
    pub path: Vec<u8>,
}

impl Task<'_> {
    /// The groups it is in, one for each hierarchy that is mounted, and the unified one's.
    pub fn control_groups(&self) -> Walk<ControlGroup> {
        let mut walk = Walk::default();
        let links = self
            .object()
            .required("cgroups", "css_set")
            .and_then(|set| set.embedded("cgrp_links", "list_head"));
        let links = match links {
            Ok(head) => list::members(head, "cgrp_cset_link", "cgrp_link"),
            Err(error) => {
                walk.note(format!("the control groups of the task at {:#x}", self.object().address()), error);
                return walk;
            }
        };
        walk.problems = links.problems;
        for link in links.found {
            walk.take(|| format!("the control group of {link}"), read(link));
        }
        walk
    }
}

fn read(link: Object<'_>) -> Result<ControlGroup> {
    let group = link.required("cgrp", "cgroup")?;
    let root = group.required("root", "cgroup_root")?;
    Ok(ControlGroup {
        hierarchy: root.u32("hierarchy_id")?,
        // The unified hierarchy's mask is of those that no other one has.
        controllers: if root.u32("hierarchy_id")? == 0 { 0 } else { root.u64("subsys_mask")? },
        name: root.text("name")?,
        path: path(group.required("kn", "kernfs_node")?)?,
    })
}

/// The names of a directory and those around it, up to the root, which has none.
fn path(directory: Object<'_>) -> Result<Vec<u8>> {
    // `parent` until 6.14.
    let above = if directory.has("__parent") { "__parent" } else { "parent" };
    let mut names = Vec::new();
    let mut at = directory;
    while let Some(next) = at.pointer(above, "kernfs_node")? {
        if names.len() >= DEEPEST {
            return Err(directory.corrupt("it is in itself"));
        }
        names.push(at.string("name")?);
        at = next;
    }
    if names.is_empty() {
        return Ok(b"/".to_vec());
    }
    Ok(names.iter().rev().flat_map(|name| [b"/", &**name].concat()).collect())
}
