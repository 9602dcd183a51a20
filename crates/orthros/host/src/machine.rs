//! One virtual machine: a QEMU process whose memory is a file that others may map, and a monitor to command it.
//!
//! The memory is a memfd, reached by its name in `/proc`: whichever file system the machine's directory is on, no page
//! of it is ever written to a disk, and however this process ends, nothing of it is left. A link in the directory leads
//! to it.

use std::fs;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom, fallocate, memfd_create, seek};

use crate::command::require;
use crate::command_line::{MachineConfig, accelerators, arguments};
use crate::error::{Error, Result, file};
use crate::kernel::KernelFiles;
use crate::net::Network;
use crate::qmp::Qmp;
use crate::socket::SOCKETS;

/// How long QEMU may take to end when it has closed its monitor.
const ENDING: Duration = Duration::from_secs(2);

/// A running machine. Dropped, it is killed and its memory file removed.
pub struct Machine {
    name: String,
    child: Child,
    directory: PathBuf,
    started: Instant,
    /// The file of the machine's memory.
    memory: OwnedFd,
    keep: bool,
}

/// Copies a file and leaves its holes as they are, by lseek(2).
fn copy_what_is_there(from: &mut fs::File, to: &mut fs::File) -> io::Result<()> {
    let length = from.metadata()?.len();
    to.set_len(length)?;
    let mut bytes = vec![0; 1 << 20];
    let mut end = 0;
    while end < length {
        let start = match seek(from.as_fd(), SeekFrom::Data(end)) {
            Ok(start) => start,
            // Nothing but a hole from there on.
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        end = seek(from.as_fd(), SeekFrom::Hole(start))?;
        let mut at = start;
        while at < end {
            let part = usize::try_from(end - at).unwrap_or(usize::MAX).min(bytes.len());
            from.read_exact_at(&mut bytes[..part], at)?;
            to.write_all_at(&bytes[..part], at)?;
            at += u64::try_from(part).unwrap_or(u64::MAX);
        }
    }
    Ok(())
}

impl Machine {
    /// Starts a machine whose files are in `directory`.
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] without QEMU, [`Error::File`], [`Error::Command`] where QEMU ends at once.
    pub fn start(config: &MachineConfig, kernel: &KernelFiles, directory: &Path) -> Result<Self> {
        Self::start_within(config, kernel, directory, None)
    }

    /// The same with QEMU in a network, where its card's port is.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub fn start_within(
        config: &MachineConfig,
        kernel: &KernelFiles,
        directory: &Path,
        network: Option<&Network>,
    ) -> Result<Self> {
        let qemu = require("qemu-system-x86_64", "qemu-system-x86")?;
        fs::create_dir_all(directory).map_err(file("create", directory))?;
        let at = |kind: &str| directory.join(format!("{}.{kind}", config.name));
        let memory = memfd_create("orrery-guest", MemfdFlags::CLOEXEC)
            .map_err(|error| file("create", &at("ram"))(error.into()))?;
        for kind in ["qmp", "control", "ram", "console"] {
            // Of a machine that was killed along with its watcher, and could not tidy up.
            let _ = fs::remove_file(at(kind));
        }
        let name = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        symlink(&name, at("ram")).map_err(file("create", &at("ram")))?;
        let named = |kind: &str| at(kind).display().to_string();
        let mut command = Command::new(&qemu);
        command.args(arguments(config, kernel, accelerators(), &name, named));
        let log = fs::File::create(at("qemu")).map_err(file("create", &at("qemu")))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // A terminal's Ctrl-C is for who watches over it, to end it in order.
        command.process_group(0);
        let space = network.and_then(Network::handle).map(|space| space.as_raw_fd());
        // SAFETY: both system calls concern the new process only, and touch no memory.
        unsafe {
            command.pre_exec(move || {
                // A machine does not outlive who watches over it.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                match space {
                    Some(space) if libc::setns(space, libc::CLONE_NEWNET) != 0 => {
                        Err(io::Error::last_os_error())
                    }
                    _ => Ok(()),
                }
            });
        }
        let child = command.spawn().map_err(|error| Error::Command {
            command: qemu.display().to_string(),
            why: error.to_string(),
        })?;
        let (name, directory) = (config.name.clone(), directory.to_owned());
        let mut machine = Self { name, child, directory, started: Instant::now(), memory, keep: false };
        machine.wait_for_file("qmp")?;
        Ok(machine)
    }

    fn wait_for_file(&mut self, kind: &str) -> Result<()> {
        let deadline = Instant::now() + SOCKETS;
        while !self.file(kind).exists() {
            self.look_whether_it_runs()?;
            if Instant::now() > deadline {
                return Err(self.timeout(SOCKETS.as_secs(), "QEMU's sockets"));
            }
            sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn timeout(&self, seconds: u64, what: &str) -> Error {
        let hint = format!("; its console is in {}", self.file("console").display());
        Error::Timeout { machine: self.name.clone(), seconds, what: what.to_owned(), hint }
    }

    /// The name it was given.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns when it was started.
    #[must_use]
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Returns the number of its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// One of its files: `ram`, `console`, `control`, `qmp` or `qemu`.
    #[must_use]
    pub fn file(&self, kind: &str) -> PathBuf {
        self.directory.join(format!("{}.{kind}", self.name))
    }

    /// Connects to its monitor.
    ///
    /// # Errors
    ///
    /// [`Error::Qmp`]; [`Error::Command`] with what QEMU said where it has ended, as for a disk that another one has.
    pub fn qmp(&mut self) -> Result<Qmp> {
        let connected = Qmp::connect(&self.name, &self.file("qmp"));
        if connected.is_err() {
            let deadline = Instant::now() + ENDING;
            while Instant::now() < deadline {
                self.look_whether_it_runs()?;
                sleep(Duration::from_millis(5));
            }
        }
        connected
    }

    /// Gives what QEMU said if it has ended.
    fn look_whether_it_runs(&mut self) -> Result<()> {
        let Ok(Some(status)) = self.child.try_wait() else { return Ok(()) };
        let said = fs::read_to_string(self.file("qemu")).unwrap_or_default();
        Err(Error::Command { command: "qemu".to_owned(), why: format!("{status}: {}", said.trim()) })
    }

    /// Returns what its console has shown so far.
    #[must_use]
    pub fn console(&self) -> String {
        let mut bytes = Vec::new();
        if let Ok(mut file) = fs::File::open(self.file("console")) {
            let _ = file.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).replace('\r', "")
    }

    /// Waits until its console shows `text`, and gives all that it has shown.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], [`Error::Command`] where the machine ended before.
    pub fn wait_for_console(&mut self, text: &str, patience: Duration) -> Result<String> {
        let deadline = Instant::now() + patience;
        loop {
            let console = self.console();
            if console.contains(text) {
                return Ok(console);
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                let said = fs::read_to_string(self.file("qemu")).unwrap_or_default();
                let why = format!("{status} before it showed {text:?}: {}", said.trim());
                return Err(Error::Command { command: format!("qemu of {}", self.name), why });
            }
            if Instant::now() > deadline {
                return Err(self.timeout(patience.as_secs(), &format!("{text:?} on the console")));
            }
            sleep(Duration::from_millis(20));
        }
    }

    /// Puts its memory into its directory as a file, which stays when the machine is gone. Pages that were never used
    /// take no room.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where that cannot be written; the memory is then still where it was.
    pub fn preserve_memory(&mut self) -> Result<()> {
        let (path, aside) = (self.file("ram"), self.file("ram.new"));
        let copied = fs::File::open(&path).and_then(|mut from| {
            let mut to = fs::File::create(&aside)?;
            copy_what_is_there(&mut from, &mut to)?;
            fs::rename(&aside, &path)
        });
        copied.map_err(|error| {
            let _ = fs::remove_file(&aside);
            file("write", &path)(error)
        })?;
        self.keep = true;
        Ok(())
    }

    /// Gives its memory back to the host, which others may still map, and of which nobody wants to know any more. The
    /// machine must be dead.
    pub(crate) fn release_memory(&self) -> Result<()> {
        let failed = |error: rustix::io::Errno| file("empty", &self.file("ram"))(error.into());
        let length = rustix::fs::fstat(&self.memory).map_err(failed)?.st_size;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.memory, flags, 0, length.unsigned_abs()).map_err(failed)
    }

    /// Returns whether its QEMU is there.
    pub(crate) fn runs(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Kills it; its memory stays until this value is dropped.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.kill();
        if !self.keep {
            let _ = fs::remove_file(self.file("ram"));
        }
        for kind in ["control", "qmp"] {
            let _ = fs::remove_file(self.file(kind));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_not_copied() {
        use std::os::unix::fs::MetadataExt as _;
        let directory = tempfile::tempdir().unwrap();
        let open = |name| {
            fs::File::options()
                .create(true)
                .truncate(true)
                .read(true)
                .write(true)
                .open(directory.path().join(name))
        };
        let (mut from, mut to) = (open("from").unwrap(), open("to").unwrap());
        from.set_len(64 << 20).unwrap();
        from.write_all_at(b"here", 5 << 20).unwrap();
        copy_what_is_there(&mut from, &mut to).unwrap();
        let mut bytes = [0; 4];
        to.read_exact_at(&mut bytes, 5 << 20).unwrap();
        assert_eq!((&bytes, to.metadata().unwrap().len()), (b"here", 64 << 20));
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20);
    }
}
