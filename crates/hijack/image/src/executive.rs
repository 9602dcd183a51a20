//! What runs inside the program. Each directory uses those above it alone:
//!
//! | directory | contents |
//! |---|---|
//! | `abi` | system calls, signal frames, the program's memory, state, the assembly's functions |
//! | `memory` | the program's code: which it is, stubs, jumps, what stood there before |
//! | `policy` | the policy's table, its conditions and rules, the journal |
//! | `services` | functions that answer calls in the kernel's place |
//! | `signals` | the program's signal handlers, masks and alternate stacks |
//! | `process` | starting, forking, executing, mapping memory |
//! | `rewriting` | which sites are rewritten, and how |
//! | `dispatch` | where calls arrive, and their way from rules to services to the kernel |

pub(crate) mod abi;
pub(crate) mod dispatch;
pub(crate) mod memory;
pub(crate) mod policy;
pub(crate) mod process;
pub(crate) mod rewriting;
pub(crate) mod services;
pub(crate) mod signals;
