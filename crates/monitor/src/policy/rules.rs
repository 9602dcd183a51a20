//! Rules that come from elsewhere, asked beside the policy: what `orrery run --enforce` is made of.
//!
//! A [`Policy`](super::Policy) lists what is allowed; rules rather say what becomes of certain calls, in their order,
//! and let all others pass. Here they are asked where the policy is asked: about the path as the program wrote it,
//! before the file is looked for, and about the path of the file that was found, as the kernel spells it. What a rule
//! has denied of either is not done, through any link.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use syscalls::Sysno;

/// What becomes of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is performed.
    Pass,
    /// It fails with this error of errno(3).
    Fails(i32),
    /// It returns this.
    Returns(i64),
    /// It is performed on this path in place of that which was asked about.
    Path(Vec<u8>),
    /// It goes to this `struct sockaddr` in place of the address that was asked about.
    Address(Vec<u8>),
}

/// Where a call goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination<'a> {
    /// An internet address.
    Internet(SocketAddr),
    /// A Unix socket: its path, or a zero byte and its abstract name.
    Unix(&'a [u8]),
    /// Of another family.
    Other,
}

/// What may be executed: files, and directories with all that lies beneath.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Executions {
    /// All but these.
    AllBut(Vec<PathBuf>),
    /// Only these.
    Only(Vec<PathBuf>),
}

/// Rules about calls. They are asked by several threads at a time.
pub trait Rules: Send + Sync {
    /// What becomes of this call with any arguments; `None` where it depends on them, or nothing is said.
    fn call(&self, call: &str) -> Option<Verdict>;

    /// Whether paths or addresses are to be asked about for this call.
    fn asks(&self, call: &str) -> bool;

    /// What becomes of a call with this path, which is absolute.
    fn path(&self, call: &str, path: &[u8]) -> Verdict;

    /// What becomes of a call that goes there.
    fn address(&self, call: &str, address: Destination<'_>) -> Verdict;

    /// Whether something is said of paths beneath this one, so that it must not be renamed.
    fn keeps_names(&self, path: &[u8]) -> bool;

    /// What may be executed. The second wall holds that, too.
    fn executions(&self) -> Executions;
}

/// Rules that were given.
#[derive(Clone)]
pub(crate) struct Given(pub(crate) Arc<dyn Rules>);

impl std::fmt::Debug for Given {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Rules")
    }
}

/// What becomes of a call with any arguments.
pub(crate) fn unconditional(rules: &dyn Rules, call: Sysno) -> Option<Verdict> {
    rules.call(call.name()).filter(|ruling| *ruling != Verdict::Pass)
}
