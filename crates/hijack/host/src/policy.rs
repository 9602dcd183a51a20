//! Policies: rules about system calls, read from TOML, checked, and compiled to what executives read.
//!
//! ```toml
//! [[rule]]
//! call = ["open", "openat"]      # names, or groups: %file, %descriptor, %network, or * for all
//! path = "/etc/shadow"           # one pattern or several: * within a name, ** across slashes
//! deny = "EACCES"
//! ```
//!
//! | condition | holds if |
//! |---|---|
//! | `call` | it is one of these |
//! | `path` | one of its paths (or, where it takes a descriptor, what that leads to) matches one of these |
//! | `descriptor` | its descriptor is a `file`, `directory`, `socket`, `pipe`, `character`, `block` or `other` |
//! | `address` | it goes to one of these addresses: `10.0.0.0/8:443`, `[::1]`, `*:80`, `unix:/run/**` |
//! | `caller` | the call instruction, or one of the nearest return addresses, is in the code of one of these files |
//! | `program` | the program that was executed is one of these |
//!
//! | action | what happens |
//! |---|---|
//! | `allow = true` | it is performed; further rules are not asked |
//! | `deny = "EPERM"` | it returns this error, and is not performed |
//! | `return = 0` | it returns this value, and is not performed |
//! | `rewrite = "/other"` | the part of the path before the pattern's first star is replaced by this |
//! | `redirect = "127.0.0.1:8080"` | it connects to this address |
//! | `short = 1` | it transfers so many bytes at most |
//! | `handler = "check.wasm"` | this module decides: see `orrery-handler` |
//! | `delay = "5ms"` | it waits first |
//! | `log = true` | it is logged |
//!
//! `log` and `delay` go with each other and with any one of the others. `every = 3` acts on each third call that fits
//! only, `after = 10` not on the first ten, `times = 1` once at most: counted over all processes of a run.
//!
//! Beside rules, a policy can turn services on: calls that executives answer themselves ([`Services`]).
//!
//! ```toml
//! [services]
//! sleep = "precise"              # or "realtime"
//! remember = ["process", "user"]
//! poll-receive = "100us"         # threads of real-time priority look for a datagram for so long before they block
//!
//! [[mount]]                      # an archive, seen as a directory that cannot be written to
//! prefix = "/opt/app"
//! archive = "app.tar"
//! ```

mod automaton;
mod compile;
mod handler_compiler;
mod services;
mod table;
mod text;
mod values;
mod view;

use orrery_hijack_image::policy::{Rule, action, log};

pub use crate::arg_types::{Descriptors, Detail};
use compile::Compiled;
pub use orrery_policy::{Manager, PolicyError};
pub use services::{LONGEST_POLL, Mount, Remembered, Services, Sleep, poll_time};
pub(crate) use table::{Strictness, handlers_code};
pub(crate) use values::errno;
pub use view::{Destination, Effect, RuleView};

/// A policy that was checked.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    rules: Vec<Compiled>,
    lines: Vec<usize>,
    services: Services,
    manager: Option<Manager>,
    detail: Detail,
    /// Signals that are told of, one bit each.
    signals: u64,
}

impl Policy {
    /// Reads a policy; `name` is for messages.
    ///
    /// # Errors
    /// The first thing that is wrong with it, with line and column.
    pub fn parse(text: &str, name: &str) -> Result<Self, PolicyError> {
        text::parse(text, name)
    }

    /// A policy that changes nothing, and tells of these calls; with `places`, from where they come, too.
    pub fn telling(calls: Vec<u32>, places: bool) -> Self {
        let rule = Rule { log: if places { log::PLACES } else { log::CALLS }, ..Rule::default() };
        Self {
            rules: vec![Compiled { rule, calls, descriptors: true, ..Compiled::default() }],
            lines: vec![0],
            ..Self::default()
        }
    }

    /// Returns the same policy, but only where a path of the call matches one of these patterns.
    #[must_use]
    pub fn about(mut self, patterns: &[String]) -> Self {
        for compiled in &mut self.rules {
            compiled.path = patterns.join("\0").into_bytes();
        }
        self
    }

    /// Returns the same policy, which logs so much of each call.
    #[must_use]
    pub fn detailed(mut self, detail: Detail) -> Self {
        self.detail = detail;
        self
    }

    /// The same, telling of these signals, too, when handlers get them: one bit each, SIGHUP being the lowest.
    #[must_use]
    pub fn with_signals(mut self, signals: u64) -> Self {
        self.signals = signals;
        self
    }

    /// A policy that has one call fail where it comes from one place, once or always.
    pub fn failing(call: u32, site: u64, errno: i32, times: u32) -> Self {
        let value = -i64::from(errno);
        let rule = Rule { action: action::ANSWER, value, site, times, ..Rule::default() };
        Self {
            rules: vec![Compiled { rule, calls: vec![call], descriptors: true, ..Compiled::default() }],
            lines: vec![0],
            ..Self::default()
        }
    }

    /// A policy that has one call transfer so many bytes at most where it comes from one place, once or always.
    pub fn cutting(call: u32, site: u64, bytes: u32, times: u32) -> Self {
        let mut policy = Self::failing(call, site, 0, times);
        for compiled in &mut policy.rules {
            compiled.rule.action = action::SHORT;
            compiled.rule.value = bytes.into();
        }
        policy
    }

    /// This policy, then that of `other`: where this one decides, the other one is not asked.
    #[must_use]
    pub fn then(mut self, other: Self) -> Self {
        let shift = u32::try_from(self.lines.len()).unwrap_or(u32::MAX);
        self.rules.extend(other.rules.into_iter().map(|mut compiled| {
            compiled.rule.counter = compiled.rule.counter.saturating_add(shift);
            compiled
        }));
        self.lines.extend(other.lines);
        self.signals |= other.signals;
        self.services = self.services.or(other.services);
        self.manager = self.manager.or(other.manager);
        self
    }

    /// Returns the same rules, with these services.
    #[must_use]
    pub fn with_services(mut self, services: Services) -> Self {
        self.services = services;
        self
    }

    /// Returns which calls are answered by executives themselves.
    pub fn services(&self) -> &Services {
        &self.services
    }

    /// Returns how a service manager is to serve the program, if the policy says so.
    pub fn manager(&self) -> Option<&Manager> {
        self.manager.as_ref()
    }

    /// Returns whether some rule tells of calls, or its handler of what it finds.
    pub fn tells(&self) -> bool {
        let emits = |compiled: &Compiled| compiled.handler.as_ref().is_some_and(|handler| handler.emits());
        self.rules.iter().any(|compiled| compiled.rule.log != 0 || emits(compiled))
    }

    /// In which line each rule begins.
    pub fn lines(&self) -> &[usize] {
        &self.lines
    }
}
