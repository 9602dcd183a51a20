//! Signal dispositions and the alternate stack.

use orrery_sys::signals::{self, Action, AlternateStack, LAST, Mask};

use crate::error::Leftover;

/// Signals whose disposition nobody can change.
const FIXED: Mask = signals::mask_of(&[libc::SIGKILL, libc::SIGSTOP]);

/// Every disposition, and the calling thread's alternate stack.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Signals {
    actions: [Action; LAST as usize],
    stack: AlternateStack,
}

impl Signals {
    pub(crate) const NONE: Self = Self {
        actions: [Action { handler: 0, flags: 0, restorer: 0, mask: 0 }; LAST as usize],
        stack: AlternateStack::NONE,
    };

    pub(crate) fn capture(&mut self) {
        for signal in changeable() {
            if let Ok(action) = signals::action(signal) {
                self.actions[index(signal)] = action;
            }
        }
        self.stack = signals::alternate_stack();
    }

    /// Puts back what differs.
    pub(crate) fn restore(&self) -> Result<(), Leftover> {
        for signal in changeable() {
            let wanted = &self.actions[index(signal)];
            if signals::action(signal).as_ref() != Ok(wanted) {
                // SAFETY: the disposition was in force when the state was captured, and what it names is back in place.
                unsafe { signals::set_action(signal, wanted) }.map_err(|_| Leftover::Signal(signal))?;
            }
        }
        if signals::alternate_stack() != self.stack {
            // SAFETY: the stack was the alternate one when the state was captured, and its memory is
            // restored. This code runs on the engine's stack, so the present alternate stack is not in use.
            unsafe { signals::set_alternate_stack(&self.stack) }
                .map_err(|_| Leftover::Attribute("alternate stack"))?;
        }
        Ok(())
    }
}

fn changeable() -> impl Iterator<Item = i32> {
    (1..=LAST).filter(|signal| FIXED >> (signal - 1) & 1 == 0)
}

fn index(signal: i32) -> usize {
    usize::try_from(signal - 1).unwrap_or(0)
}
