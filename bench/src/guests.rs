//! Virtual machines that mount the same image of a tree, each with a shell.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use orrery_orthros_host::{Error, Initramfs, KernelFiles, Machine, MachineConfig, cache, command};
use orrery_testing::guest::{INIT, MODULES, Shell};
use serde::Deserialize;

use crate::contender::Skipped;
use crate::machine;

/// How long a kernel may take to boot, and a command to run, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// How often the memory of a guest is looked at until it stays the same, which takes the guest's kernel some rounds of 2 s.
const LOOK: Duration = Duration::from_secs(3);
/// What changes between two looks at a guest that rests.
const REST: u64 = 256 << 10;
/// Has the guest's kernel report free memory, which QEMU returns.
const BALLOON: [&str; 2] = ["-device", "virtio-balloon-pci,free-page-reporting=on"];

/// An image that `orrery orc image` has made; removed when this is dropped.
#[derive(Debug)]
pub struct Image {
    /// The file.
    pub path: PathBuf,
    /// QEMU's options, and the guest's command that mounts it at `/mnt`.
    pub made: Made,
}

/// What `orrery orc image --json` prints.
#[derive(Debug, Deserialize)]
pub struct Made {
    /// QEMU's options.
    pub qemu: Vec<String>,
    /// The guest's command.
    pub mount: String,
}

fn orrery(path: &Path) -> Result<Command> {
    let mut command = Command::new(machine::program_directory()?.join("orrery"));
    command.args(["orc", "image", "--output"]).arg(path);
    Ok(command)
}

impl Image {
    /// Makes the image of a tree.
    ///
    /// # Errors
    /// [`Skipped`] where it cannot be made here.
    pub fn make(tree: &Path, path: &Path) -> Result<Self> {
        let output = orrery(path)?.arg("--json").arg(tree).output().context("cannot start orrery")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !said.contains("erofs-utils") && !said.contains("immutable"),
            Skipped(said.trim().to_owned())
        );
        ensure!(output.status.success(), "{said}");
        Ok(Self { path: path.to_owned(), made: serde_json::from_slice(&output.stdout)? })
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = orrery(&self.path).and_then(|mut command| Ok(command.arg("--remove").status()?));
    }
}

/// What all guests boot.
#[derive(Debug)]
pub struct Boot {
    kernel: KernelFiles,
    initramfs: PathBuf,
    directory: PathBuf,
}

impl Boot {
    /// Writes it to a directory, where the guests have their files.
    ///
    /// # Errors
    /// [`Skipped`] without QEMU, busybox or a kernel.
    pub fn new(directory: &Path) -> Result<Self> {
        let skipped = |error: Error| Skipped(error.to_string());
        command::require("qemu-system-x86_64", "qemu-system-x86").map_err(skipped)?;
        let busybox = command::require("busybox", "busybox-static").map_err(skipped)?;
        let kernel = KernelFiles::obtain(&cache()).map_err(skipped)?;
        let mut archive = Initramfs::new();
        archive.file("/init", INIT, 0o755).program(&busybox, "/bin/busybox")?;
        for (index, module) in kernel.modules(&MODULES)?.into_iter().enumerate() {
            archive.file(&format!("/modules/{index:03}.ko"), module, 0o644);
        }
        let initramfs = directory.join("initramfs");
        archive.write(&initramfs)?;
        Ok(Self { kernel, initramfs, directory: directory.to_owned() })
    }

    /// Starts a guest with `memory` MiB and more options for QEMU. It reports free memory to the host, which takes it back.
    ///
    /// # Errors
    /// Those of QEMU, and where it does not boot.
    pub fn start(&self, name: &str, memory: u64, options: &[String]) -> Result<Guest> {
        let config = MachineConfig {
            name: name.to_owned(),
            memory_mib: memory,
            cpus: 1,
            // Where memory could be added above 4 GiB, the kernel would reserve 64 MiB for devices that reach only what is below.
            append: "swiotlb=noforce".to_owned(),
            initramfs: self.initramfs.clone(),
            peer: None,
            extra: BALLOON.iter().map(|&option| option.to_owned()).chain(options.iter().cloned()).collect(),
        };
        let mut machine = Machine::start(&config, &self.kernel, &self.directory)?;
        machine.wait_for_console("READY", PATIENCE)?;
        let shell =
            Shell::connect(&machine.file("control"), PATIENCE).context("cannot reach a guest's shell")?;
        Ok(Guest { machine, shell })
    }
}

/// A running virtual machine, which ends with this object.
pub struct Guest {
    machine: Machine,
    shell: Shell,
}

impl Guest {
    /// Runs a command that must succeed, and returns what it prints.
    ///
    /// # Errors
    /// Where it fails, or the guest ends.
    pub fn run(&mut self, command: &str) -> Result<String> {
        let console = self.machine.file("console");
        let answer = self.shell.run(command).with_context(|| {
            let console = fs::read_to_string(console).unwrap_or_default();
            format!("a guest does not answer to {command}; its console: {console}")
        })?;
        match answer {
            (0, output) => Ok(output),
            (status, output) => bail!("{command} exits with {status}: {output}"),
        }
    }

    /// Waits until the guest has returned its free memory, and returns what it has then.
    ///
    /// # Errors
    /// As for [`proportional`](Self::proportional), and where it goes on changing.
    pub fn rested(&self) -> Result<u64> {
        let mut last = self.proportional()?;
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            std::thread::sleep(LOOK);
            let now = self.proportional()?;
            if now.abs_diff(last) < REST {
                return Ok(now);
            }
            last = now;
        }
        bail!("the memory of a guest that does nothing still changes after {} s", PATIENCE.as_secs())
    }

    /// Returns the memory of the guest in bytes: its own, and the pages of its images, each divided by the processes that map it (`Pss` of
    /// the shared mappings in `/proc/PID/smaps`). What QEMU takes besides, for translated code above all, is not the guest's.
    ///
    /// # Errors
    /// Where the kernel does not report it.
    pub fn proportional(&self) -> Result<u64> {
        let path = format!("/proc/{}/smaps", self.machine.pid());
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let (mut sum, mut is_shared) = (0, false);
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match (words.next(), words.next()) {
                (Some("Pss:"), Some(number)) if is_shared => sum += number.parse::<u64>()?,
                (Some(range), Some(access)) if !range.ends_with(':') => is_shared = access.ends_with('s'),
                _ => {}
            }
        }
        ensure!(sum > 0, "{path} reports no memory of a guest");
        Ok(sum << 10)
    }
}
