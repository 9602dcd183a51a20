//! A warm backup kernel beside the active one: machines, their images, their network, and the failover.

pub mod command;
mod error;
mod initramfs;
mod kernel;
mod machine;
mod qmp;

pub use error::{Error, Result};
pub use initramfs::Initramfs;
pub use kernel::{KernelFiles, cache};
pub use machine::{Machine, MachineConfig};
pub use qmp::{Event, Qmp};
