//! Signal dispositions and the alternate stack.
//!
//! `/proc/self/status` tells of all signals at once which are ignored and which are caught, so that most dispositions need
//! no question of their own: a signal that is to have its default effect, and has, has nothing else that counts. The
//! kernel looks at flags, mask and restorer of a disposition when it calls a handler (`signal.c`: `get_signal`,
//! `setup_rt_frame`), and otherwise for SIGCHLD alone (`SA_NOCLDWAIT`, `SA_NOCLDSTOP`: `do_notify_parent`,
//! `do_notify_parent_cldstop`). So these are asked about: what is to be caught, since one handler may have taken another's
//! place; SIGCHLD; and what is not in the state that it is to be in. What sigaction(2) tells of the flags of the others
//! stays as it was set. Once all were asked about, a later capture asks about the same ones alone.

use orrery_sys::signals::{self, Action, AlternateStack, LAST, Mask};

use crate::error::Leftover;
use crate::undo::attributes::Status;

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

    /// Returns the dispositions of now. `before` has those of an earlier capture, if there was one; `shown` is what the kernel shows now
    /// of all signals.
    pub(crate) fn now(before: Option<&Self>, shown: Option<Shown>) -> Self {
        let mut now = *before.unwrap_or(&Self::NONE);
        for signal in changeable() {
            if (before.is_none() || now.is_doubtful(signal, shown))
                && let Ok(action) = signals::action(signal)
            {
                now.actions[index(signal)] = action;
            }
        }
        now.stack = signals::alternate_stack();
        now
    }

    /// Returns whether only a question about `signal` itself tells whether it has its disposition, where these are `shown`.
    fn is_doubtful(&self, signal: i32, shown: Option<Shown>) -> bool {
        let bit = signals::mask_of(&[signal]);
        let wanted = self.actions[index(signal)].handler;
        let as_wanted = shown.is_some_and(|Shown { ignored, caught }| {
            (ignored & bit != 0, caught & bit != 0) == (wanted == libc::SIG_IGN, is_handler(wanted))
        });
        !as_wanted || is_handler(wanted) || signal == libc::SIGCHLD
    }

    /// Puts back what differs. `shown` is what the kernel shows of all signals, now that nobody else can change them.
    pub(crate) fn restore(&self, shown: Option<Shown>) -> Result<(), Leftover> {
        for signal in changeable().filter(|&signal| self.is_doubtful(signal, shown)) {
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

/// Which signals are ignored, and which have handlers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shown {
    ignored: Mask,
    caught: Mask,
}

impl Shown {
    /// Returns what `/proc/self/status` shows.
    pub(crate) fn of(status: &Status) -> Option<Self> {
        Some(Self { ignored: status.signals(b"SigIgn:")?, caught: status.signals(b"SigCgt:")? })
    }
}

fn is_handler(handler: usize) -> bool {
    handler != libc::SIG_DFL && handler != libc::SIG_IGN
}

fn changeable() -> impl Iterator<Item = i32> {
    (1..=LAST).filter(|signal| FIXED >> (signal - 1) & 1 == 0)
}

fn index(signal: i32) -> usize {
    usize::try_from(signal - 1).unwrap_or(0)
}
