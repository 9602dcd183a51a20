//! The configuration of a pair.

use std::path::PathBuf;
use std::time::Duration;

use crate::disk::DiskConfig;
use crate::image::Service;
use crate::net::NetworkConfig;

/// The configuration of a pair.
#[derive(Clone, Debug)]
pub struct PairConfig {
    /// The directory of its files: memory, consoles, sockets.
    pub directory: PathBuf,
    /// The directory in which kernels are cached.
    pub cache: PathBuf,
    /// The service that it runs.
    pub service: Service,
    /// The memory of each machine in MiB, a power of two.
    pub memory_mib: u64,
    /// The number of processors of each machine.
    pub cpus: u32,
    /// How long a processor may be silent before its machine counts as dead.
    pub silence: Duration,
    /// The network in which the service is reached, which requires root; without it the service has none.
    pub network: Option<NetworkConfig>,
    /// The service's disk.
    pub disk: Option<DiskConfig>,
    /// More parameters for the command line of the guests' kernel.
    pub append: String,
}
