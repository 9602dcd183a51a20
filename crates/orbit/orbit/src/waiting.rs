//! Calls that wait: how many may, and which a new one skips or cancels.

use core::sync::atomic::Ordering;

use crate::call::Call;
use crate::control_block::Claim;
use crate::error::{Error, Result};
use crate::flags::Flags;
use crate::protocol::{Function, Request};
use crate::state::State;

impl State {
    pub(crate) fn has_room(&self, bound: u32) -> bool {
        let unsettled = self.queued.len() - self.settled;
        // Settled calls keep their slots until the orbit has come past them.
        unsettled < bound as usize && self.queued.len() < self.side.bound() as usize
    }

    /// Skips or cancels, as the flags of a new call will have it.
    pub(crate) fn apply_flags(&mut self, call: &Call<'_>) -> Result<()> {
        let skip = Flags::SKIP_ANY | Flags::SKIP_SAME_ARGUMENT;
        let cancel = Flags::CANCEL_ANY | Flags::CANCEL_SAME_ARGUMENT;
        if !call.flags.has_any(skip | cancel) {
            return Ok(());
        }
        let function = (call.function.map_or(0, Function::address) as u64).to_ne_bytes();
        let new = (function.as_slice(), call.arguments);
        for index in 0..self.queued.len() {
            let queued_call = &self.queued[index];
            if queued_call.settled || self.control.claim(queued_call.number) != Claim::Queued {
                continue;
            }
            let same = || Request::likeness(self.side.waiting_message(queued_call.number)) == Some(new);
            if call.flags.has(Flags::SKIP_ANY) || call.flags.has(Flags::SKIP_SAME_ARGUMENT) && same() {
                return Err(Error::Skipped { waiting: queued_call.call });
            }
            if queued_call.cancellable
                && (call.flags.has(Flags::CANCEL_ANY)
                    || call.flags.has(Flags::CANCEL_SAME_ARGUMENT) && same())
            {
                self.cancel(index);
            }
        }
        Ok(())
    }

    /// Cancels a queued call unless the orbit has taken it.
    pub(crate) fn cancel(&mut self, index: usize) -> bool {
        let queued_call = &mut self.queued[index];
        if queued_call.settled || !self.control.turn(queued_call.number, Claim::Cancelled) {
            return false;
        }
        queued_call.settled = true;
        self.settled += 1;
        let (record, call) = (queued_call.record, queued_call.call);
        self.records.close(record, call, Err(Error::Cancelled { call }));
        self.statistics.failed().fetch_add(1, Ordering::Relaxed);
        // Others may wait for it.
        self.side.gate().stir();
        true
    }

    pub(crate) fn cancel_oldest(&mut self) -> bool {
        (0..self.queued.len()).any(|index| self.queued[index].cancellable && self.cancel(index))
    }
}
