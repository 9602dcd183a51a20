//! A dead kernel's memory, read into the model.

mod attributes;
mod clocks;
mod cpu_registers;
mod estimate;
mod file_owner;
mod file_table;
mod io_calls;
mod io_progress;
mod locks;
mod memory;
mod open_file;
mod process;
mod remarks;
mod restore_state;
mod seccomp;
#[cfg(test)]
mod single_step_tests;
mod socket_options;
mod syscalls;
mod terminals;
mod thread;
mod unix;

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use orrery_kimage::Kernel;

use crate::model::Service;
use clocks::Clocks;
use process::Reader;

pub use cpu_registers::CpuRegisters;
pub use estimate::estimate_memory;
pub use file_table::MAX_UNNAMED_FILE;

/// Reads the process `pid` and its descendants. With `lazy`, pages that can arrive after the service runs are marked so.
///
/// What cannot be restored affects only itself: a file descriptor is hung up, a process counts as killed, with its descendants,
/// and its parent is notified. Each is a remark.
///
/// # Errors
///
/// The process `pid` itself cannot be restored; the error says why.
pub fn read_service(
    kernel: &Kernel,
    cpus: &CpuRegisters,
    pid: i32,
    lazy: bool,
    exclusions: &Exclusions,
) -> Result<Service> {
    let clocks = Clocks::read(kernel).context("cannot read the dead kernel's clocks")?;
    Reader::new(kernel, cpus, clocks, lazy, exclusions).read(pid)
}

/// What is not to be restored, each with the reason: an attempt has failed because of it. Processes are named by their PIDs in the
/// service's PID namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exclusions {
    /// The processes that count as killed.
    pub processes: BTreeMap<u32, String>,
    /// The file descriptors of processes that are hung up.
    pub descriptors: BTreeMap<(u32, u32), String>,
}

/// Returns the time of day at which the kernel died, in nanoseconds: no other death has the same.
///
/// # Errors
///
/// The kernel's clocks cannot be read.
pub fn time_of_death(kernel: &Kernel) -> Result<u64> {
    Ok(Clocks::read(kernel)?.now(libc::CLOCK_REALTIME.cast_unsigned()))
}
