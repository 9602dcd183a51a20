//! Places whose threads died between asking and taking the answer, and those in which a program has written nonsense.

use std::sync::atomic::Ordering::Acquire;

use orrery_hijack_image::request_slots::{
    ANSWERED, CLAIMED, FREE, IN_SERVICE, PENDING, REQUESTS, RESERVED, owner, release, tag,
};
use orrery_hijack_image::shared_page::SharedPage;

use crate::futex::Futex;

/// So often is a place seen unchanged before it is taken from a thread that seems dead: the thread may be in another
/// PID namespace, where it has another number, and about to go on. (If it goes on later, it asks again.)
const LOOKS: u32 = 8;

/// What was seen of each place last, and how often.
pub(super) struct StaleRequests([(u32, u32); REQUESTS]);

impl Default for StaleRequests {
    fn default() -> Self {
        Self([(0, 0); REQUESTS])
    }
}

impl StaleRequests {
    /// Gives places back that nobody will, if they have been so for some looks.
    pub(super) fn look(&mut self, page: &SharedPage) {
        for (place, (last, looks)) in page.requests.slots.iter().zip(&mut self.0) {
            let now = place.state.load(Acquire);
            *looks = if now == *last { looks.saturating_add(1) } else { 1 };
            *last = now;
            let left = match tag(now) {
                // Who was woken for it has died.
                RESERVED => *looks > 1,
                // A thread that answers such a request finds that the slot is not its own any more.
                CLAIMED | IN_SERVICE | ANSWERED => *looks > LOOKS && is_dead(owner(now)),
                // The supervisor's threads go on with it.
                PENDING => false,
                _ => now != FREE && *looks > LOOKS,
            };
            if left {
                release(&page.requests, place, now, &Futex);
            }
        }
    }
}

fn is_dead(thread: u32) -> bool {
    let thread = i32::try_from(thread).ok().and_then(rustix::process::Pid::from_raw);
    thread.is_some_and(|thread| rustix::process::test_kill_process(thread) == Err(rustix::io::Errno::SRCH))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Release;

    use orrery_hijack_image::request_slots::state;

    use super::*;
    use crate::shared_segment::SharedSegment;

    #[test]
    fn places_of_the_dead_are_given_back_and_no_others() {
        let own = std::process::id();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let dead = child.id();
        let segment = SharedSegment::new().unwrap();
        let states = [
            (state(CLAIMED, dead), FREE),
            (state(ANSWERED, dead), FREE),
            (RESERVED, FREE),
            (state(IN_SERVICE, dead), FREE),
            // Nonsense.
            (state(FREE, own), FREE),
            (state(RESERVED, own), FREE),
            (state(RESERVED + 1, own), FREE),
            (state(RESERVED + 2, dead), FREE),
            // The supervisor itself goes on with this.
            (state(PENDING, dead), state(PENDING, dead)),
            (state(IN_SERVICE, own), state(IN_SERVICE, own)),
            (state(CLAIMED, own), state(CLAIMED, own)),
            (state(ANSWERED, own), state(ANSWERED, own)),
        ];
        let places = &segment.first().page().requests;
        for (place, (before, _)) in places.slots.iter().zip(states) {
            place.state.store(before, Release);
        }
        let mut stale = StaleRequests::default();
        stale.look(segment.first().page());
        assert!(
            places.slots.iter().zip(states).all(|(place, (before, _))| place.state.load(Acquire) == before)
        );
        for _ in 0..LOOKS {
            stale.look(segment.first().page());
        }
        for (place, (before, after)) in places.slots.iter().zip(states) {
            assert_eq!(place.state.load(Acquire), after, "{before:#x}");
        }
    }
}
