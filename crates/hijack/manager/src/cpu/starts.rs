//! Whether any process or thread was started since the last look: one read for all tracees, in place of several for each.
//!
//! The last field of `/proc/loadavg` is the PID that the kernel has given last ([proc_loadavg(5)](
//! https://man7.org/linux/man-pages/man5/proc_loadavg.5.html)); threads have one, too, and so have processes in namespaces below.
//! A program that chooses the PIDs that it gives (clone3(2) with `set_tid`, which restores checkpoints) does not show.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

/// `PROC_SUPER_MAGIC`: what a container's `/proc` may have in the place of the file (lxcfs) counts PIDs every few seconds only.
const PROC: u64 = 0x9fa0;

/// The PID that was given last.
#[derive(Debug)]
pub(super) struct Starts {
    file: Option<File>,
    last: Option<u64>,
}

impl Starts {
    /// Begins to look.
    pub(super) fn new() -> Self {
        Self::of(File::open("/proc/loadavg").ok())
    }

    fn of(file: Option<File>) -> Self {
        let of_kernel = |file: &File| {
            rustix::fs::fstatfs(file).is_ok_and(|found| u64::try_from(found.f_type) == Ok(PROC))
        };
        Self { file: file.filter(of_kernel), last: None }
    }

    /// Returns whether something was started since this was asked last; always where that does not show.
    pub(super) fn have_been(&mut self) -> bool {
        let last = self.read();
        std::mem::replace(&mut self.last, last) != last || last.is_none()
    }

    fn read(&self) -> Option<u64> {
        let mut buffer = [0; 128];
        let length = self.file.as_ref()?.read_at(&mut buffer, 0).ok()?;
        std::str::from_utf8(buffer.get(..length)?).ok()?.split_whitespace().nth(4)?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_started_shows() {
        let mut starts = Starts::new();
        assert!(starts.have_been(), "nobody has looked before");
        // Others start processes and threads meanwhile; now and then nobody does.
        orrery_testing::eventually("nothing is started", || !starts.have_been());
        std::thread::spawn(|| ()).join().unwrap();
        assert!(starts.have_been());
        std::process::Command::new("true").status().unwrap();
        assert!(starts.have_been());
    }

    #[test]
    fn where_it_does_not_show_something_may_always_have_been_started() {
        let other = tempfile::tempfile().unwrap();
        other.write_all_at(b"0.00 0.00 0.00 1/2 3\n", 0).unwrap();
        for file in [None, Some(other)] {
            let mut starts = Starts::of(file);
            assert!(starts.have_been() && starts.have_been());
        }
    }
}
