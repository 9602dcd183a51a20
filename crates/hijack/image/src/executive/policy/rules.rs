//! What becomes of a call: the rules of the policy, in their order.
//!
//! The first rule that allows the call, or answers it, has the last word; others change or delay it, and let further
//! rules decide. Conditions are about the call as the program made it. No state but counters on the shared page, so a
//! signal handler of the program may leave at any point.

use core::sync::atomic::Ordering::Relaxed;

use super::conditions::{Call, Facts};
use super::handlers::{self, Decision};
use super::path_filter;
use super::table::Policy;
use crate::executive::abi::state::shared_page;
use crate::executive::abi::syscall::{EINTR, ENAMETOOLONG, address, address_mut, call};
use crate::executive::abi::user_memory;
use crate::nr;
use crate::policy::{NO_ARGUMENT, Rule, Shape, action};

const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
const CLOCK_MONOTONIC: u64 = 1;
const TIMER_ABSTIME: u64 = 1;

/// What the rules make of a call.
pub(crate) enum Outcome {
    /// The program gets this result; nothing is performed.
    Answer(i64),
    /// The call is performed, with these arguments. They may point into [`Changes`] and the room for paths.
    Perform([u64; 6]),
}

/// What the rules have decided about a call.
pub(crate) struct Verdict {
    pub(crate) outcome: Outcome,
    /// The last rule that asks for an entry in the journal.
    pub(crate) logged: Option<&'static Rule>,
}

/// A call's arguments as rules have changed them, with memory that these may point to: it has to stay until the call was performed.
pub(crate) struct Changes {
    arguments: [u64; 6],
    /// Where the call goes, if the program's socket speaks IPv6 and the rule's address is one of IPv4.
    mapped: [u8; 28],
    /// What is left of a list of buffers.
    piece: [u64; 2],
}

/// Asks the rules about a call.
pub(crate) fn judge(call: &Call, facts: &mut Facts<'_>, changes: &mut Changes) -> Verdict {
    let Call { policy, number, arguments, stack, .. } = *call;
    let shape = policy.shape(number);
    let mut logged = None;
    let by_descriptor = path_filter::is_fstat(number, &arguments, stack);
    for rule in policy.rules(number) {
        if by_descriptor && rule.descriptors == 0 {
            continue;
        }
        let fitting = match facts.matches(rule) {
            Ok(Some(fitting)) => fitting,
            Ok(None) => continue,
            Err(error) => return Verdict { outcome: Outcome::Answer(error), logged },
        };
        if !is_due(rule) {
            continue;
        }
        if rule.log != 0 {
            logged = Some(rule);
        }
        if rule.delay != 0 {
            wait(rule.delay);
        }
        match rule.action {
            action::ALLOW => break,
            action::ANSWER => return Verdict { outcome: Outcome::Answer(rule.value), logged },
            action::SHORT => changes.shorten(shape, rule.value.cast_unsigned()),
            action::REWRITE => {
                let mut refused = None;
                for (which, _) in fitting.iter().enumerate().filter(|(_, fits)| **fits) {
                    if let Err(error) = changes.rewrite(shape, rule, which, policy, facts) {
                        refused = Some(error);
                    }
                }
                if let Some(error) = refused {
                    return Verdict { outcome: Outcome::Answer(error), logged };
                }
            }
            action::HANDLER => {
                let decision = handlers::decide(call, rule, &mut changes.arguments, &mut facts.room);
                if decision.delay != 0 {
                    wait(decision.delay);
                }
                match decision.outcome {
                    Decision::Pass => {}
                    Decision::Allow => break,
                    Decision::Answer(result) => return Verdict { outcome: Outcome::Answer(result), logged },
                }
            }
            action::REDIRECT => changes.redirect(shape, policy.bytes(rule.target)),
            _ => {}
        }
    }
    Verdict { outcome: Outcome::Perform(changes.arguments), logged }
}

/// Counts a hit, and says whether it is one to act on.
fn is_due(rule: &Rule) -> bool {
    // Two additions that processors have to agree on take as long as a handler: it is counted where that decides something.
    if rule.action == action::HANDLER && rule.every <= 1 && rule.after == 0 && rule.times == 0 {
        return true;
    }
    let Some(count) = shared_page().rules.get(rule.counter as usize) else { return false };
    let hit = count.hits.fetch_add(1, Relaxed);
    let Some(hit) = hit.checked_sub(u64::from(rule.after)) else { return false };
    if rule.every > 1 && !(hit + 1).is_multiple_of(u64::from(rule.every)) {
        return false;
    }
    if rule.times != 0 && count.acts.load(Relaxed) >= u64::from(rule.times) {
        return false;
    }
    let act = count.acts.fetch_add(1, Relaxed);
    // Two may have found the last one due.
    rule.times == 0 || act < u64::from(rule.times)
}

/// Waits, through all signals.
fn wait(nanoseconds: u64) {
    const SECOND: u64 = 1_000_000_000;
    let mut until = [0_u64; 2];
    // SAFETY: both calls take a `struct timespec` of two words.
    unsafe {
        call(nr::clock_gettime, [CLOCK_MONOTONIC, address_mut(&mut until), 0, 0, 0, 0]);
        let all = until[1].saturating_add(nanoseconds);
        until = [until[0].saturating_add(all / SECOND), all % SECOND];
        let arguments = [CLOCK_MONOTONIC, TIMER_ABSTIME, address(&until), 0, 0, 0];
        while call(nr::clock_nanosleep, arguments) == -EINTR {}
    }
}

impl Changes {
    pub(crate) fn new(arguments: [u64; 6]) -> Self {
        Self { arguments, mapped: [0; 28], piece: [0; 2] }
    }

    fn set(&mut self, index: u8, value: u64) {
        if let Some(place) = self.arguments.get_mut(usize::from(index)) {
            *place = value;
        }
    }

    fn argument(&self, index: u8) -> u64 {
        self.arguments.get(usize::from(index)).copied().unwrap_or(0)
    }

    /// Has the call transfer so many bytes at most.
    fn shorten(&mut self, shape: &Shape, most: u64) {
        if shape.count != NO_ARGUMENT {
            self.set(shape.count, self.argument(shape.count).min(most));
        } else if shape.vector != NO_ARGUMENT && self.argument(shape.vector + 1) > 0 {
            // SAFETY: two words.
            if let Ok([start, length]) = unsafe { user_memory::read::<[u64; 2]>(self.argument(shape.vector)) }
            {
                self.piece = [start, length.min(most)];
                self.set(shape.vector, address(&self.piece));
                self.set(shape.vector + 1, 1);
            }
        }
    }

    /// Has the call use a path whose beginning is another one.
    fn rewrite(
        &mut self,
        shape: &Shape,
        rule: &Rule,
        which: usize,
        policy: Policy,
        facts: &mut Facts<'_>,
    ) -> Result<(), i64> {
        let paths = facts.paths()?;
        let (Some(path), Some(&argument)) = (paths.get(which), shape.path.get(which)) else { return Ok(()) };
        let rest = path.get(rule.prefix as usize..).unwrap_or(&[]);
        let target = policy.bytes(rule.target);
        let new = facts.room.take(|room| {
            let length = target.len() + rest.len();
            let place = room.get_mut(..=length).ok_or(-ENAMETOOLONG)?;
            let (beginning, end) = place.split_at_mut(target.len());
            beginning.copy_from_slice(target);
            end[..rest.len()].copy_from_slice(rest);
            end[rest.len()] = 0;
            Ok(length + 1)
        })?;
        self.set(argument, new.as_ptr().addr() as u64);
        Ok(())
    }

    /// Has the call go to another address.
    fn redirect(&mut self, shape: &Shape, target: &'static [u8]) {
        let family = |bytes: &[u8]| bytes.first_chunk::<2>().map(|family| u16::from_ne_bytes(*family));
        // SAFETY: any two bytes are a family.
        let given = unsafe { user_memory::read::<u16>(self.argument(shape.address)) }.unwrap_or(0);
        if given == AF_INET6 && family(target) == Some(AF_INET) {
            // ::ffff:a.b.c.d
            self.mapped[..2].copy_from_slice(&AF_INET6.to_ne_bytes());
            self.mapped[2..4].copy_from_slice(target.get(2..4).unwrap_or(&[0; 2]));
            self.mapped[18..20].fill(0xff);
            self.mapped[20..24].copy_from_slice(target.get(4..8).unwrap_or(&[0; 4]));
            self.set(shape.address, address(&self.mapped));
            self.set(shape.address + 1, self.mapped.len() as u64);
        } else {
            self.set(shape.address, target.as_ptr().addr() as u64);
            self.set(shape.address + 1, target.len() as u64);
        }
    }
}
