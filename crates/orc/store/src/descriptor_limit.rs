//! The limit of open files (`RLIMIT_NOFILE`): each object and each connection needs a descriptor, in the server and in its
//! supervisor.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that are kept free for messages under way, and for the store itself.
const RESERVED: usize = 384;

/// Raises the limit of this process as far as it may be raised.
pub(crate) fn raise() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // If this fails, there are fewer, and clients are refused for that reason.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// Returns how many descriptors objects and connections may use: the limit less [`RESERVED`].
pub(crate) fn for_clients() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    limit - RESERVED.min(limit / 2)
}
