//! The policy's table, as the supervisor has put it into this process.

use core::sync::atomic::Ordering::Relaxed;

use crate::automaton::Automaton;
use crate::capture::{ArgCapture, CAPTURES};
use crate::executive::abi::state::ORRERY_CONFIG;
use crate::handler::Handler;
use crate::nr::CALLS;
use crate::policy::{Mount, Rule, Shape, Table, Text};

/// The policy, if there is one.
#[inline(always)]
pub(crate) fn policy() -> Option<Policy> {
    let address = ORRERY_CONFIG.policy.load(Relaxed) as usize;
    (address != 0).then(|| Policy { table: core::ptr::with_exposed_provenance(address) })
}

/// A table that stays as long as the process, and does not change.
#[derive(Clone, Copy)]
pub(crate) struct Policy {
    table: *const Table,
}

impl Policy {
    fn table(self) -> &'static Table {
        // SAFETY: the supervisor has written a table there, in memory that the program cannot unmap (`memory::code_ranges`).
        unsafe { &*self.table }
    }

    fn slice<T>(self, text: Text, count: u32) -> &'static [T] {
        // SAFETY: the table's offsets are within it, and are aligned for what they are offsets of.
        unsafe {
            let start = self.table.cast::<u8>().add(text.start as usize).cast::<T>();
            core::slice::from_raw_parts(start, count as usize)
        }
    }

    /// A handler, if there is one of this index.
    pub(crate) fn handler(self, index: i64) -> Option<&'static Handler> {
        let handlers = self.table().handlers;
        self.slice::<Handler>(handlers, handlers.length).get(index as usize)
    }

    /// The address of something in the table, by its offset.
    pub(crate) fn address(self, offset: u32) -> u64 {
        self.table.addr() as u64 + u64::from(offset)
    }

    /// Some bytes of the table.
    pub(crate) fn bytes(self, text: Text) -> &'static [u8] {
        self.slice(text, text.length)
    }

    /// The rules that are about a call, in their order.
    pub(crate) fn rules(self, number: u64) -> impl Iterator<Item = &'static Rule> + Clone {
        let table = self.table();
        let span = table.calls.get((number as usize).min(CALLS)).copied().unwrap_or_default();
        let (first, count) = (usize::from(span.first), usize::from(span.count));
        let references = self.slice::<u16>(table.references, table.references.length);
        let rules = self.slice::<Rule>(table.rules, table.rules.length);
        let own = references.get(first..first + count).unwrap_or(&[]);
        own.iter().filter_map(|index| rules.get(usize::from(*index)))
    }

    /// Returns the rule about a call, if there is one alone, and that nothing but a handler which [compares](super::handlers::compare).
    #[inline(always)]
    pub(crate) fn bare(self, number: u64) -> Option<(&'static Rule, &'static Handler)> {
        let span = self.table().calls.get((number as usize).min(CALLS))?;
        if span.count != 1 {
            return None;
        }
        let references = self.slice::<u16>(self.table().references, self.table().references.length);
        let index = references.get(usize::from(span.first))?;
        let rules = self.slice::<Rule>(self.table().rules, self.table().rules.length);
        let rule = rules.get(usize::from(*index)).filter(|rule| rule.bare != 0)?;
        Some((rule, self.handler(rule.value)?))
    }

    /// Returns whether there are any.
    #[inline(always)]
    pub(crate) fn concerns(self, number: u64) -> bool {
        self.table().calls.get((number as usize).min(CALLS)).is_some_and(|span| span.count != 0)
    }

    /// Returns whether some rule does more than log.
    pub(crate) fn decides(self) -> bool {
        self.table().decides != 0
    }

    /// Returns whether some signals are reported.
    pub(crate) fn reports_signals(self) -> bool {
        self.table().signals != 0
    }

    /// Returns whether a signal is reported.
    pub(crate) fn reports_signal(self, signal: i32) -> bool {
        signal > 0 && self.table().signals >> (signal - 1).min(63) & 1 != 0
    }

    /// Returns what becomes of programs that cannot be followed: one of [`crate::policy::unfollowed`].
    pub(crate) fn unfollowed(self) -> u64 {
        self.table().unfollowed
    }

    /// Device and inode of the file to which messages go, where it is standard error.
    pub(crate) fn messages(self) -> [u64; 2] {
        self.table().messages
    }

    /// Returns what is known of a call.
    pub(crate) fn shape(self, number: u64) -> &'static Shape {
        let shapes = &self.table().shapes;
        shapes.get(number as usize).unwrap_or(&shapes[CALLS])
    }

    /// Returns what is captured of the memory that a call names.
    pub(crate) fn captures(self, number: u64) -> &'static [ArgCapture; CAPTURES] {
        let captures = &self.table().captures;
        captures.get(number as usize).unwrap_or(&captures[CALLS])
    }

    /// The file systems that programs see where the kernel has none.
    pub(crate) fn mounts(self) -> &'static [Mount] {
        let mounts = self.table().mounts;
        self.slice(mounts, mounts.length)
    }

    /// Returns the automaton of all path patterns.
    #[inline(always)]
    pub(crate) fn automaton(self) -> Option<Automaton<'static>> {
        let text = self.table().automaton;
        if text.length == 0 { None } else { Automaton::new(self.slice(text, text.length / 8)) }
    }

    /// The patterns for files whose code may call.
    pub(crate) fn callers(self) -> &'static [Text] {
        let callers = self.table().callers;
        self.slice(callers, callers.length)
    }
}
