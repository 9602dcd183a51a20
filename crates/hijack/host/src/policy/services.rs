//! Services: which calls executives answer in the kernel's place. All are off unless a policy turns them on.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use orrery_hijack_image::config::service;
pub use orrery_policy::{Remembered, Sleep};

/// The services of a policy: its section `[services]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Services {
    /// The way in which sleeps end.
    pub sleep: Option<Sleep>,
    /// What is remembered instead of asked again.
    pub remember: Vec<Remembered>,
    /// How long receive calls look for a datagram before they block: at most [`LONGEST_POLL`].
    pub poll_receive: Option<Duration>,
    /// File systems that programs see where the kernel has none: the policy's `[[mount]]`s.
    pub mounts: Vec<Mount>,
}

/// The longest time for which a receive call looks for a datagram before it blocks.
pub const LONGEST_POLL: Duration = Duration::from_millis(10);

/// Parses for how long receive calls look for a datagram: a duration above zero, and of [`LONGEST_POLL`] at most.
///
/// # Errors
/// What is wrong with the text.
pub fn poll_time(text: &str) -> Result<Duration, String> {
    let time = orrery_policy::values::duration(text)?;
    if time.is_zero() || time > LONGEST_POLL {
        return Err(format!("cannot poll for {text}: choose a time above 0 and of {LONGEST_POLL:?} at most"));
    }
    Ok(time)
}

/// An archive that programs see as a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    pub(crate) prefix: String,
    pub(crate) archive: PathBuf,
}

impl Mount {
    /// Has programs see the content of a tar file at a path, read-only.
    ///
    /// # Errors
    /// What is wrong with the path.
    pub fn new(prefix: &str, archive: impl Into<PathBuf>) -> Result<Self, String> {
        let normal = |component| matches!(component, Component::RootDir | Component::Normal(_));
        let path = Path::new(prefix);
        if !path.is_absolute() || !path.components().all(normal) || prefix.contains('\0') {
            return Err(format!("{prefix:?} is no path from the root without .. in it"));
        }
        let prefix: PathBuf = path.components().collect();
        if prefix == Path::new("/") || prefix.starts_with("/proc") {
            return Err(format!("{} stays the kernel's: mount below another directory", prefix.display()));
        }
        Ok(Self { prefix: prefix.display().to_string(), archive: archive.into() })
    }

    /// Returns where programs see it.
    pub fn prefix(&self) -> &Path {
        Path::new(&self.prefix)
    }
}

impl Services {
    /// As executives know them.
    pub(crate) fn bits(&self) -> u64 {
        let sleep = match self.sleep {
            None => 0,
            Some(Sleep::Precise) => service::SLEEP,
            Some(Sleep::Realtime) => service::SLEEP | service::REALTIME,
        };
        let bit = |remembered: &Remembered| match remembered {
            Remembered::Process => service::PROCESS,
            Remembered::User => service::USER,
        };
        let mounts = if self.mounts.is_empty() { 0 } else { service::MOUNT };
        let receive = if self.poll_receive.is_none() { 0 } else { service::RECEIVE };
        self.remember.iter().map(bit).fold(sleep | mounts | receive, |bits, bit| bits | bit)
    }

    /// How long receive calls look for a datagram, as executives know it.
    pub(crate) fn poll_receive_nanoseconds(&self) -> u64 {
        self.poll_receive.map_or(0, |time| u64::try_from(time.min(LONGEST_POLL).as_nanos()).unwrap_or(0))
    }

    /// These, and those of `other`; where both say something, these hold.
    #[must_use]
    pub fn or(mut self, other: Self) -> Self {
        self.sleep = self.sleep.or(other.sleep);
        self.remember.extend(other.remember);
        self.poll_receive = self.poll_receive.or(other.poll_receive);
        self.mounts.extend(other.mounts);
        self
    }

    /// The first mount that is within another one, and that one: neither would be seen from the other.
    pub fn nested(&self) -> Option<(&Mount, &Mount)> {
        let pairs = self.mounts.iter().enumerate().flat_map(|(index, mount)| {
            let others = self.mounts.iter().enumerate().filter(move |(other, _)| *other != index);
            others.map(move |(_, other)| (mount, other))
        });
        pairs.into_iter().find(|(mount, other)| mount.prefix().starts_with(other.prefix()))
    }
}
