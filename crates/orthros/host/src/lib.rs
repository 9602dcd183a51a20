//! A warm backup kernel beside the active one: machines, their images, their network, and the failover.

mod arp;
pub mod command;
mod command_line;
mod control;
mod disk;
mod error;
mod fault;
mod guest;
mod initramfs;
mod kernel;
mod machine;
mod manner;
mod means;
mod member;
mod net;
mod pair;
mod pulse;
mod qmp;
mod status;
mod unit;

pub use control::{Control, Said, Step};
pub use disk::{DiskConfig, DiskSource};
pub use error::{Error, Result};
pub use fault::Fault;
pub use guest::{Service, guest_program, write_image};
pub use initramfs::Initramfs;
pub use kernel::{KernelFiles, cache};
pub use machine::{Machine, MachineConfig};
pub use manner::{Folder, Identity, Invocation, Manner};
pub use net::{BridgeConfig, Network, NetworkConfig};
pub use pair::{Cause, Failover, Pair, PairConfig, Whole};
pub use qmp::{Event, Qmp};
pub use status::{Role, Status, Weight};
pub use unit::{UnitService, read_unit};
