//! The one function that runs after each rollback, for a crate that keeps state about other processes.
//!
//! Where it is noted is ordinary memory, so it is rolled back, too: a rollback to a time before [`after_rollback`] was
//! called has nothing to call, and that state does not exist either then.

use std::sync::OnceLock;

static HOOK: OnceLock<fn()> = OnceLock::new();

/// Has `hook` run at the end of each rollback, on the engine's stack, with signals blocked. Only the first hook of a
/// process counts.
pub fn after_rollback(hook: fn()) {
    HOOK.get_or_init(|| hook);
}

pub(crate) fn run() {
    if let Some(hook) = HOOK.get() {
        hook();
    }
}
