//! The template, and how sessions come from it.
//!
//! ```text
//! root      --make----> template            the template copies itself
//! template  ----------> new session         which makes itself known
//! session   --made----> root
//! root      --settle--> template            which closes its own descriptor of the session
//! template  --settled-> root
//! root      --clean---> session             which is captured
//! session   --clean---> root
//! ```
//!
//! What two contexts need to speak to each other is there before the session is captured, or the first rollback would
//! take it away. From then on the root alone holds a session, which ends when the root lets go of it. Sessions cannot
//! speak to each other or to the template: they have no descriptors of them.

use std::convert::Infallible;
use std::os::fd::RawFd;

use super::protocol::{Order, Report};
use super::session::{self, Connection};
use orrery_context::{self as context, Context, Spec, Start};

/// Returns what the template is to have of the root.
pub(crate) fn template_spec(keep: &[RawFd], isolated: bool) -> Spec {
    let mut keep: Vec<u32> =
        keep.iter().filter_map(|fd| u32::try_from(*fd).ok()).filter(|fd| *fd > 2).collect();
    keep.sort_unstable();
    keep.dedup();
    let mut spec = Spec::new().alone(true).isolate(isolated).stays_behind();
    let mut from = 3;
    for kept in keep {
        if kept > from {
            spec = spec.close_descriptors(from, kept - 1);
        }
        from = kept.saturating_add(1);
    }
    spec.close_descriptors(from, u32::MAX)
}

/// Returns the template's life.
pub(crate) fn template<F: Fn(&mut Connection)>(
    start: Start,
    open: bool,
    isolated: bool,
    memory: Option<u64>,
    serve: &F,
) -> Infallible {
    let root = start.creator;
    let mut order = Order::of(start.arrival.word);
    loop {
        let (report, reason) = match order {
            Some(Order::Make) => match make(root, open, isolated, memory, serve) {
                Ok(next) => {
                    order = next;
                    continue;
                }
                Err(reason) => (Report::Failed, reason),
            },
            _ => (Report::Settled, String::new()),
        };
        order = match root.switch(report.word(), session::cut(reason.as_bytes())) {
            Ok(arrival) => Order::of(arrival.word),
            Err(_) => context::kill_self(),
        };
    }
}

/// Makes a session, which reports to the root; gives what the root says next.
fn make<F: Fn(&mut Connection)>(
    root: Context,
    open: bool,
    isolated: bool,
    memory: Option<u64>,
    serve: &F,
) -> Result<Option<Order>, String> {
    let made = context::create(&Spec::new().alone(true).isolate(isolated), |start| {
        // The template's name.
        let _ = start.creator.close();
        session::session(root, open, memory, serve)
    })
    .map_err(|error| error.to_string())?;
    let arrival = made.switch(0, &[]);
    let _ = made.close();
    arrival.map(|arrival| Order::of(arrival.word)).map_err(|error| error.to_string())
}
