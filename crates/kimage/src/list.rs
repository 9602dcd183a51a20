//! The kernel's linked lists, which a crash may have left bent: a ring of `list_head`s, each a member of something.
//!
//! A broken link ends a walk in one direction only: the ring is then followed from its head backwards, so that what is
//! lost is what is between two breaks.

use std::collections::HashSet;

use crate::error::{Error, Result, Walk};
use crate::object::Object;

/// More members than any list that is walked here has.
const LONGEST: usize = 1 << 20;

/// The objects `kind` whose member `link` hangs on the ring of `head`, which itself is no member of any.
pub(crate) fn members<'k>(head: Object<'k>, kind: &'static str, link: &'static str) -> Walk<Object<'k>> {
    let mut walk = Walk::default();
    let mut seen = HashSet::from([head.address()]);
    let Some(broken) = follow(head, "next", kind, link, &mut seen, &mut walk.found).err() else {
        return walk;
    };
    walk.note(format!("list of {kind} at {:#x}, after {} members", head.address(), walk.found.len()), broken);
    let mut backwards = Vec::new();
    if let Err(error) = follow(head, "prev", kind, link, &mut seen, &mut backwards) {
        let during = format!("list of {kind} at {:#x}, backwards after {}", head.address(), backwards.len());
        walk.note(during, error);
    }
    walk.found.extend(backwards.into_iter().rev());
    walk
}

/// Follows one direction until the head comes round, or something that was seen before does.
fn follow<'k>(
    head: Object<'k>,
    direction: &'static str,
    kind: &'static str,
    link: &'static str,
    seen: &mut HashSet<u64>,
    found: &mut Vec<Object<'k>>,
) -> Result<()> {
    let mut at = head;
    for _ in 0..LONGEST {
        let next = at.required(direction, "list_head")?;
        if next.address() == head.address() {
            return Ok(());
        }
        if !seen.insert(next.address()) {
            // Backwards, this is where the walk forwards had come to.
            return if direction == "prev" { Ok(()) } else { Err(at.corrupt("its next was there before")) };
        }
        // An object that cannot be read to its end would be no use, and its link a trap.
        next.u64("next")?;
        found.push(next.container(kind, link)?);
        at = next;
    }
    Err(Error::Corrupt { kind: "list_head", address: head.address(), why: "it never ends".to_owned() })
}
