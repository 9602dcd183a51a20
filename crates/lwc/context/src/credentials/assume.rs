//! Credentials of another context, and taking them on for the time of one system call.
//!
//! The kernel keeps credentials per thread, and a bare system call changes the calling thread's alone. One's own user
//! stays as the *saved* one, to which the way back is free.

use rustix::io::Errno;
use rustix::process::Pid;
use syscalls::{Sysno, syscall};

/// Who a process is, as far as permissions go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Real, effective, saved, for files.
    users: [u32; 4],
    groups: [u32; 4],
    others: Vec<u32>,
    effective: u64,
}

impl Identity {
    /// Of a process, whose `status` file everybody may read.
    pub(crate) fn of(pid: Pid) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_pid())).ok()?)
    }

    fn parse(status: &str) -> Option<Self> {
        let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let numbers = |name: &str| -> Option<Vec<u32>> {
            line(name)?.split_whitespace().map(|number| number.parse().ok()).collect()
        };
        Some(Self {
            users: numbers("Uid")?.try_into().ok()?,
            groups: numbers("Gid")?.try_into().ok()?,
            others: numbers("Groups")?,
            effective: u64::from_str_radix(line("CapEff")?.trim(), 16).ok()?,
        })
    }

    /// Does something with these credentials in place of one's own.
    pub(crate) fn lend<T>(&self, own: &Self, act: impl FnOnce() -> T) -> rustix::io::Result<T> {
        if self == own {
            return Ok(act());
        }
        let dumpable = rustix::process::dumpable_behavior();
        let taken = self.take(own);
        let done = taken.map(|()| act());
        own.restore()?;
        // The kernel closes a process to debuggers that changes its user.
        if let Ok(dumpable) = dumpable
            && rustix::process::dumpable_behavior() != Ok(dumpable)
        {
            let _ = rustix::process::set_dumpable_behavior(dumpable);
        }
        done
    }

    fn take(&self, own: &Self) -> rustix::io::Result<()> {
        set_groups(&self.others)?;
        set_all(Sysno::setresgid, self.groups[0], self.groups[1], own.groups[2])?;
        set_all(Sysno::setresuid, self.users[0], self.users[1], own.users[2])?;
        set_effective(self.effective)
    }

    fn restore(&self) -> rustix::io::Result<()> {
        set_all(Sysno::setresuid, self.users[0], self.users[1], self.users[2])?;
        // All that is permitted stays so.
        set_effective(u64::MAX)?;
        set_all(Sysno::setresgid, self.groups[0], self.groups[1], self.groups[2])?;
        set_groups(&self.others)?;
        set_effective(self.effective)
    }
}

fn set_all(call: Sysno, real: u32, effective: u32, saved: u32) -> rustix::io::Result<()> {
    // SAFETY: changes who the calling thread is.
    checked(unsafe { syscall!(call, real, effective, saved) })
}

fn set_groups(groups: &[u32]) -> rustix::io::Result<()> {
    // SAFETY: the kernel reads so many numbers.
    checked(unsafe { syscall!(Sysno::setgroups, groups.len(), groups.as_ptr()) })
}

/// Leaves of the permitted capabilities those effective that are in `wanted`.
fn set_effective(wanted: u64) -> rustix::io::Result<()> {
    const VERSION: u32 = 0x2008_0522;
    let header = [VERSION, 0];
    let mut sets = [[0_u32; 3]; 2];
    // SAFETY: the kernel reads the header and writes two sets of effective, permitted and inheritable capabilities.
    checked(unsafe { syscall!(Sysno::capget, header.as_ptr(), sets.as_mut_ptr()) })?;
    let half = |index: usize| u32::try_from(wanted >> (32 * index) & 0xffff_ffff).unwrap_or(0);
    for (index, set) in sets.iter_mut().enumerate() {
        set[0] = set[1] & half(index);
    }
    // SAFETY: the kernel reads the header and the three sets of two words each.
    checked(unsafe { syscall!(Sysno::capset, header.as_ptr(), sets.as_ptr()) })
}

fn checked(result: Result<usize, syscalls::Errno>) -> rustix::io::Result<()> {
    result.map(|_| ()).map_err(|errno| Errno::from_raw_os_error(errno.into_raw()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_understood() {
        let text =
            "Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t9 10 \nCapEff:\t000001ffffffffff\n";
        let expected = Identity {
            users: [1, 2, 3, 4],
            groups: [5, 6, 7, 8],
            others: vec![9, 10],
            effective: 0x1ff_ffff_ffff,
        };
        assert_eq!(Identity::parse(text), Some(expected));
        assert_eq!(Identity::parse("Uid:\t1\t2\n"), None);
        assert!(Identity::of(rustix::process::getpid()).is_some());
    }
}
