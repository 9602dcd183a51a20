//! The kernel's red-black trees, walked in order. Source: Linux `lib/rbtree.c`.

use std::collections::HashSet;

use crate::error::Result;
use crate::kernel::Kernel;
use crate::object::Object;

const MOST: usize = 1 << 20;

/// The objects `kind` whose member `link` is a node of the tree whose root pointer is `root`, in order.
///
/// # Errors
///
/// Those of reading; a tree that goes round is corrupt. There is no second way round a tree: what cannot be walked
/// whole is not used.
pub(crate) fn members<'k>(
    kernel: &'k Kernel,
    root: u64,
    kind: &'static str,
    link: &'static str,
) -> Result<Vec<Object<'k>>> {
    let mut found = Vec::new();
    let mut seen = HashSet::new();
    let mut pending = Vec::new();
    let mut next = root;
    loop {
        while next != 0 {
            let node = kernel.object("rb_node", next)?;
            if !seen.insert(next) || seen.len() > MOST {
                return Err(node.corrupt("it is its own descendant"));
            }
            pending.push(node);
            next = node.u64("rb_left")?;
        }
        let Some(node) = pending.pop() else { return Ok(found) };
        found.push(node.container(kind, link)?);
        next = node.u64("rb_right")?;
    }
}
