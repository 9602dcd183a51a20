//! What a parked context does when it is asked for something.
//!
//! Those who wait ([`crate::switch`]) know no more than that there are such functions; so what answers a request may
//! itself wait, and ask.

use crate::fork::{checkpoint, context_copy, new_root};
use crate::memory::overlay;
use crate::threads::state_lock::Handlers;

pub(crate) static HANDLERS: Handlers = Handlers {
    adopt_copies: new_root::adopt,
    copy_for_fork: context_copy::serve,
    checkpoint: checkpoint::serve,
    answer: overlay::serve,
};
