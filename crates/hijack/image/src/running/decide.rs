//! What becomes of a call: the rules of the policy, in their order.
//!
//! The first rule that allows the call, or answers it, has the last word; others change or delay it, and let further
//! rules be asked. Conditions are about the call as the program made it. Nothing is kept but counters on the board, so a
//! signal handler of the program may leave at any point.

use core::mem::MaybeUninit;
use core::sync::atomic::Ordering::Relaxed;

use super::clock;
use super::conditions::Facts;
use super::count::board;
use super::kernel::{EINTR, ENAMETOOLONG, address, address_mut, call};
use super::paths::Room;
use super::policy::{Policy, policy};
use super::{journal, permits, user};
use crate::journal::{ANSWERED, DONE, ENTERED};
use crate::numbers;
use crate::policy::{NO_ARGUMENT, Rule, Shape, action};

/// Room for the paths of a call that names two.
const ROOM: usize = 8 << 10;
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
const CLOCK_MONOTONIC: u64 = 1;
const TIMER_ABSTIME: u64 = 1;

/// Performs a call, or does with it what the policy says. `site` is behind the call instruction.
#[inline(always)]
pub(crate) fn decide(
    number: u64,
    arguments: [u64; 6],
    site: u64,
    stack: u64,
    perform: impl FnOnce([u64; 6]) -> i64,
) -> i64 {
    match policy() {
        Some(policy) if policy.concerns(number) => {
            let call = Call { policy, number, arguments, site, stack };
            let paths = policy.rules(number).any(|rule| rule.path.length != 0);
            if paths { with_room(&call, perform) } else { judged(&call, &mut [], perform) }
        }
        _ => perform(arguments),
    }
}

struct Call {
    policy: Policy,
    number: u64,
    arguments: [u64; 6],
    site: u64,
    stack: u64,
}

/// Paths need memory: the program's stack provides it, for those calls alone for which rules name paths.
#[inline(never)]
fn with_room(call: &Call, perform: impl FnOnce([u64; 6]) -> i64) -> i64 {
    let mut room = MaybeUninit::<[u8; ROOM]>::uninit();
    // SAFETY: bytes that are written before they are read: nothing that `Room` has not handed out is looked at.
    judged(call, unsafe { &mut *room.as_mut_ptr() }, perform)
}

/// What a call becomes.
struct Plan {
    arguments: [u64; 6],
    /// Instead of performing it.
    answer: Option<i64>,
    /// Where it goes, if the program's socket speaks IPv6 and the rule's address is one of IPv4.
    mapped: [u8; 28],
    /// What is left of a list of buffers.
    piece: [u64; 2],
}

#[inline(never)]
fn judged(call: &Call, room: &mut [u8], perform: impl FnOnce([u64; 6]) -> i64) -> i64 {
    let Call { policy, number, arguments, site, stack } = *call;
    let shape = policy.shape(number);
    let mut facts = Facts::new(policy, number, arguments, site, stack, Room::new(room));
    let mut plan = Plan { arguments, answer: None, mapped: [0; 28], piece: [0; 2] };
    let mut told = None;
    let by_descriptor = permits::is_fstat(number, &arguments, stack);
    for rule in policy.rules(number) {
        if by_descriptor && rule.descriptors == 0 {
            continue;
        }
        let fitting = match facts.meet(rule) {
            Ok(Some(fitting)) => fitting,
            Ok(None) => continue,
            Err(error) => {
                plan.answer = Some(error);
                break;
            }
        };
        if !is_due(rule) {
            continue;
        }
        if rule.log != 0 {
            told = Some(rule);
        }
        if rule.delay != 0 {
            wait(rule.delay);
        }
        match rule.action {
            action::ALLOW => break,
            action::ANSWER => plan.answer = Some(rule.value),
            action::SHORT => plan.shorten(shape, rule.value.cast_unsigned()),
            action::REWRITE => {
                for (which, _) in fitting.iter().enumerate().filter(|(_, fits)| **fits) {
                    if let Err(error) = plan.rewrite(shape, rule, which, policy, &mut facts) {
                        plan.answer = Some(error);
                    }
                }
            }
            action::REDIRECT => plan.redirect(shape, policy.bytes(rule.target)),
            _ => {}
        }
        if plan.answer.is_some() {
            break;
        }
    }
    let answer = plan.answer;
    let go = || match answer {
        Some(answer) => answer,
        None => perform(plan.arguments),
    };
    let result = match told {
        None => go(),
        Some(rule) => tell(call, rule, &mut facts, answer.is_some(), go),
    };
    core::hint::black_box((&plan.mapped, &plan.piece));
    result
}

/// Performs a call and tells of it.
fn tell(call: &Call, rule: &Rule, facts: &mut Facts<'_>, answered: bool, go: impl FnOnce() -> i64) -> i64 {
    let mut entry = journal::begin(call.number, call.arguments, call.site, rule, facts);
    let looks = call.policy.looks(call.number);
    journal::look_before(&mut entry, looks);
    entry.start = clock::ticks();
    if !answered && may_not_return(call.number) {
        entry.state = ENTERED;
        journal::write(&entry);
    }
    let result = go();
    if result == 0 && is_birth(call.number) {
        // The child.
        return result;
    }
    entry.ticks = clock::since(entry.start).unwrap_or(0);
    entry.result = result;
    entry.state = if answered { ANSWERED } else { DONE };
    if !answered {
        journal::look_after(&mut entry, looks);
    }
    journal::write(&entry);
    result
}

/// Tells how a call ended whose beginning was told, but which did not return to where that was done.
pub(crate) fn tell_result(number: u64, result: i64) {
    let told = |policy: Policy| policy.rules(number).any(|rule| rule.log != 0);
    if policy().is_some_and(told) {
        journal::write(&journal::result(number, result));
    }
}

fn is_birth(number: u64) -> bool {
    matches!(number, numbers::fork | numbers::vfork | numbers::clone | numbers::clone3)
}

/// Calls after which the program may be another one, or gone, or on another stack.
fn may_not_return(number: u64) -> bool {
    matches!(
        number,
        numbers::execve | numbers::execveat | numbers::exit | numbers::exit_group | numbers::rt_sigreturn
    ) || is_birth(number)
}

/// Counts a hit, and says whether it is one to act on.
fn is_due(rule: &Rule) -> bool {
    let Some(count) = board().rules.get(rule.counter as usize) else { return false };
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

/// Waits, whatever signals come meanwhile.
fn wait(nanoseconds: u64) {
    const SECOND: u64 = 1_000_000_000;
    let mut until = [0_u64; 2];
    // SAFETY: both calls take a `struct timespec` of two words.
    unsafe {
        call(numbers::clock_gettime, [CLOCK_MONOTONIC, address_mut(&mut until), 0, 0, 0, 0]);
        let all = until[1].saturating_add(nanoseconds);
        until = [until[0].saturating_add(all / SECOND), all % SECOND];
        let arguments = [CLOCK_MONOTONIC, TIMER_ABSTIME, address(&until), 0, 0, 0];
        while call(numbers::clock_nanosleep, arguments) == -EINTR {}
    }
}

impl Plan {
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
            if let Ok([start, length]) = unsafe { user::read::<[u64; 2]>(self.argument(shape.vector)) } {
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
        let given = unsafe { user::read::<u16>(self.argument(shape.address)) }.unwrap_or(0);
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
