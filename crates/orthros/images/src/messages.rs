//! The messages of CRIU's image format, generated at build time from `proto/`.

#![allow(missing_docs, unreachable_pub, reason = "generated")]

include!(concat!(env!("OUT_DIR"), "/criu.rs"));

impl Fown {
    /// No owner: nobody gets a signal when the file is ready.
    pub(crate) const NONE: Self = Self { uid: 0, euid: 0, signum: 0, pid_type: 0, pid: 0 };
}
