//! A warm backup kernel beside the active one: machines, their images, their network, and the failover.

mod arp;
pub mod command;
mod command_line;
mod config;
mod control;
mod disk;
mod error;
mod fault;
mod heartbeat;
mod image;
mod initramfs;
mod kernel;
mod machine;
mod net;
mod node;
mod pair;
mod qmp;
mod requirements;
mod socket;
mod status;
mod unit;

pub use command_line::MachineConfig;
pub use config::PairConfig;
pub use control::Control;
pub use disk::{DiskConfig, DiskSource};
pub use error::{Error, Result};
pub use fault::Fault;
pub use image::{Service, guest_program, load_program, write_image};
pub use initramfs::Initramfs;
pub use kernel::{KernelFiles, cache};
pub use machine::Machine;
pub use net::{BridgeConfig, Network, NetworkConfig};
pub use orrery_orthros_wire::{
    Credentials, Directory, ExecCommand, ExecConfig, ServiceExit, Step, Summary, WorkingDirectory,
    WrittenBack,
};
pub use pair::{Cause, Failover, LazyPages, Pair};
pub use qmp::{Event, Qmp};
pub use status::{MemoryEstimate, Role, Status};
pub use unit::{UnitService, read_unit};
