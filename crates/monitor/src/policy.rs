//! What a program may do: the policy, as the monitor asks it.

pub(crate) mod capabilities;
pub(crate) mod network;
pub(crate) mod rules;
pub(crate) mod syscalls;
pub(crate) mod text;
pub(crate) mod trees;
pub(crate) mod view;

use std::path::Path;
use std::sync::Arc;

use orrery_sys::capability::CapabilitySet;
use rustix::io::Errno;

use self::syscalls::Calls;
use network::Network;
use rules::{Given, Rules};
pub use trees::Rights;
use trees::Trees;
use view::View;

use crate::{Error, SeccompProfile};

/// What a program may do. All that is not allowed is refused.
///
/// ```
/// let policy = orrery_monitor::Policy::parse(
///     r#"
///     [files]
///     read = ["/usr", "/etc/hostname"]
///     execute = ["/usr/bin"]
///     write = ["/dev/null"]
///     "#,
/// )?;
/// let error = orrery_monitor::Policy::parse("[files]\nraed = ['/usr']").unwrap_err();
/// assert!(error.to_string().starts_with("policy:2:1: unknown field `raed`"));
/// # drop(policy);
/// # Ok::<(), orrery_monitor::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Policy {
    pub(crate) trees: Trees,
    pub(crate) network: Network,
    pub(crate) calls: Calls,
    pub(crate) limits: Limits,
    /// What of the file system is there, if not all of it.
    pub(crate) view: Option<View>,
    /// What of the superuser's power the program keeps.
    pub(crate) capabilities: CapabilitySet,
    pub(crate) refusal: Refusal,
    /// Nothing is refused: what the program does is to be recorded.
    pub(crate) learning: bool,
    /// What of it is used is to be recorded.
    pub(crate) audited: bool,
    /// Who decides about files that are opened.
    pub(crate) opens: Opens,
    /// What else is asked.
    pub(crate) rules: Option<Given>,
    /// What the kernel refuses besides.
    pub(crate) profiles: Vec<SeccompProfile>,
}

/// Who decides about files that are opened, and opens them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Opens {
    /// The kernel, where it can hold the policy and no report of refusals is wanted; else the monitor.
    #[default]
    Auto,
    /// The monitor.
    Monitor,
    /// The kernel.
    Kernel,
}

/// What the program gets to see of a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The call fails with this.
    Fails(Errno),
    /// The calling process is killed.
    Kills,
}

/// Limits that the program starts with (setrlimit(2)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Processes and threads that may be under the guard at one time.
    pub(crate) processes: Option<u32>,
    /// Bytes of address space of each process.
    pub(crate) memory: Option<u64>,
    /// Descriptors of each process.
    pub(crate) open_files: Option<u64>,
    /// Bytes of the longest file that may be written.
    pub(crate) file_size: Option<u64>,
    /// Seconds of processor time of each process.
    pub(crate) cpu_seconds: Option<u64>,
}

impl Policy {
    /// Reads a policy.
    ///
    /// # Errors
    /// What is wrong with it, with line and column.
    pub fn parse(text: &str) -> Result<Self, Error> {
        text::parse(text, "policy")
    }

    /// The same; errors call the text `name`.
    ///
    /// # Errors
    /// As of [`Policy::parse`].
    pub(crate) fn parse_named(text: &str, name: &str) -> Result<Self, Error> {
        text::parse(text, name)
    }

    /// Reads the policy in a file.
    ///
    /// # Errors
    /// As of [`Policy::parse`]; those of reading the file.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| Error::ReadPolicy { path: path.to_owned(), source })?;
        text::parse(&text, &path.display().to_string())
    }

    /// A policy under which nothing is refused that can be performed, for [`Guard::learn`](crate::Guard::learn).
    #[must_use]
    pub fn learning() -> Self {
        let mut trees = Trees::default();
        trees.allow(b"/", Rights::all());
        Self {
            trees,
            network: Network::everything(),
            calls: Calls::default(),
            limits: Limits::default(),
            view: None,
            capabilities: capabilities::ORDINARY,
            refusal: Refusal::Fails(Errno::ACCESS),
            learning: true,
            audited: false,
            opens: Opens::Monitor,
            rules: None,
            profiles: Vec::new(),
        }
    }

    /// A policy that allows all that these rules let pass. What leads around the monitor (mounts, namespaces,
    /// `io_uring` ...) is refused as ever.
    #[must_use]
    pub fn of_rules(rules: impl Rules + 'static) -> Self {
        Self {
            learning: false,
            rules: Some(Given(Arc::new(rules))),
            capabilities: capabilities::UNDER_RULES,
            ..Self::learning()
        }
    }

    /// Has the kernel refuse what a seccomp profile refuses, too. Of several all hold.
    #[must_use]
    pub fn with_seccomp_profile(mut self, profile: SeccompProfile) -> Self {
        self.profiles.push(profile);
        self
    }

    /// Whether what the program does is recorded, so that the monitor has to see all of it.
    pub(crate) fn is_recorded(&self) -> bool {
        self.learning || self.audited
    }

    /// Whether everything may be looked at, however it is reached.
    pub(crate) fn all_visible(&self) -> bool {
        self.view.is_none() && self.trees.all_visible()
    }

    /// The rights over what lies at `path`, which is absolute and free of symbolic links, `.` and `..`.
    #[must_use]
    pub fn rights(&self, path: &[u8]) -> Rights {
        self.trees.rights(path)
    }

    /// Returns the rights over what lies at `path` (as of [`rights`](Self::rights)) that `deny` or `read-only` refuse,
    /// so that no other entry can allow them.
    #[must_use]
    pub fn denied(&self, path: &[u8]) -> Rights {
        self.trees.denied(path)
    }
}
