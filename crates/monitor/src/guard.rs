//! The settings of a guard before it starts, whether it is a program or a closure that it guards.

use std::path::{Path, PathBuf};

use crate::callback::{Callback, Decision, Request};
use crate::learning::Learning;
use crate::log::Log;
use crate::{Error, Policy};

/// A guard for a [program](Guard::program) or a [closure](Guard::closure), which may do what the policy allows.
#[derive(Clone, Debug)]
pub struct Guard {
    pub(crate) policy: Policy,
    pub(crate) log: Log,
    pub(crate) landlock: bool,
    pub(crate) callback: Option<Callback>,
    pub(crate) ask: Option<PathBuf>,
    pub(crate) learn: Option<PathBuf>,
    pub(crate) forget: bool,
}

impl Guard {
    /// With both walls. `ORRERY_GUARD_LANDLOCK=off` does without the second, as on a kernel without Landlock.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        let landlock = std::env::var_os("ORRERY_GUARD_LANDLOCK").is_none_or(|word| word != "off");
        Self { policy, log: Log::default(), landlock, callback: None, ask: None, learn: None, forget: false }
    }

    /// Where refusals are written.
    #[must_use]
    pub fn log(mut self, log: Log) -> Self {
        self.log = log;
        self
    }

    /// Whether to put up the second wall where the kernel has Landlock. It has.
    #[must_use]
    pub fn landlock(mut self, landlock: bool) -> Self {
        self.landlock = landlock;
        self
    }

    /// Has `decide` asked about the calls of these names, before the policy. It runs in threads of this process.
    ///
    /// # Errors
    /// A name that no call has.
    pub fn mediate<'n>(
        mut self,
        calls: impl IntoIterator<Item = &'n str>,
        decide: impl Fn(&Request<'_>) -> Decision + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        self.callback = Some(Callback::new(calls, decide)?);
        Ok(self)
    }

    /// Has a program that listens at this Unix socket asked about each access to a file and each address that the policy does not
    /// allow: a line of JSON for each question, and one for its answer. The monitor opens all files then. What is executed is not
    /// asked about: the kernel's rules about that are made before the program starts. Without an answer, a call is refused.
    #[must_use]
    pub fn ask(mut self, socket: impl AsRef<Path>) -> Self {
        self.ask = Some(socket.as_ref().to_owned());
        self
    }

    /// Refuses nothing but what is refused under every policy, and adds what was done to the policy in this file once a
    /// program has ended. The file is made if it is not there; where it cannot be written, no program is started. Made
    /// for [`Policy::learning`].
    #[must_use]
    pub fn learn(mut self, path: impl AsRef<Path>) -> Self {
        self.learn = Some(path.as_ref().to_owned());
        self.policy.learning = true;
        self
    }

    /// Records what the policy allows, for [`Guarded::usage`](crate::Guarded::usage). The monitor then opens all files, and is asked about
    /// all paths and addresses, and about the calls that the policy names under `allow`.
    #[must_use]
    pub fn audit(mut self) -> Self {
        self.policy.audited = true;
        self
    }

    /// Whether [`learn`](Self::learn) replaces what the file says.
    #[must_use]
    pub fn forget(mut self, forget: bool) -> Self {
        self.forget = forget;
        self
    }

    /// Opens the file that is to learn. The program runs with the capabilities and limits that the file has.
    pub(crate) fn learning(&mut self) -> Result<Option<Learning>, Error> {
        let Some(path) = &self.learn else { return Ok(None) };
        let learning = Learning::open(path, self.forget)?;
        self.policy.capabilities = learning.known().capabilities;
        self.policy.limits = learning.known().limits;
        self.policy.view = learning.known().view.clone();
        Ok(Some(learning))
    }
}
