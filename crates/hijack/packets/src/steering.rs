//! Which part of each stream is dropped early: a rule without any system call.
//!
//! A stream *suffers* if it lost packets since the last step other than by its filter, or if its queue is more than a quarter full.
//! Half of what the streams of the lowest share still get is dropped then, those of the next share once these get next to nothing; a
//! stream of the lowest share that suffers by itself drops of its own. Where nobody suffers, each rate shrinks by a 32nd.

/// The share of a stream: any number; a higher one goes first.
pub type Share = u32;

/// What a stream looks like at a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// The number of queued bytes.
    pub queued: u32,
    /// The number of bytes that may be queued.
    pub limit: u32,
    /// Packets that were dropped so far, by the filter and for want of room. It wraps.
    pub drops: u32,
}

#[derive(Debug)]
struct State {
    share: Share,
    /// The most of it that is dropped early, of 2^32.
    most: u32,
    drops: u32,
    /// The part that is dropped early, of 2^32.
    rate: u32,
    /// In how many steps in a row it suffered though nothing more could be dropped for it.
    in_vain: u32,
}

/// The drop rates of some streams.
#[derive(Debug, Default)]
pub struct Steering {
    streams: Vec<State>,
    /// Whether a stream is dropped of only where one with a higher share suffers.
    for_others_only: bool,
}

/// The most that is dropped early: who gets nothing at all would never be found to need less.
const MOST: u32 = u32::MAX - u32::MAX / 64;
/// Below this, a rate is zero.
const LEAST: u32 = u32::MAX / 1024;
/// In how many steps a stream may suffer though all that can be dropped for it is dropped, until it is no reason any more to drop
/// of others: its receiver does not receive.
const PATIENCE: u32 = 100;

impl Steering {
    /// Returns one for streams with these shares, in the order in which loads are given.
    #[must_use]
    pub fn new(shares: &[Share]) -> Self {
        let mut steering = Self::default();
        shares.iter().for_each(|share| steering.add(*share, MOST, 0));
        steering
    }

    /// Returns one without streams that drops of a stream only where one with a higher share suffers: a stream of the lowest share
    /// that suffers by itself, for whatever reason, is left to the kernel.
    #[must_use]
    pub fn for_others_only() -> Self {
        Self { streams: Vec::new(), for_others_only: true }
    }

    /// Adds a stream, as the last one. At most `most` of 2^32 of its packets are dropped early. `drops` is what it has lost so far.
    pub fn add(&mut self, share: Share, most: u32, drops: u32) {
        self.add_dropping(share, most, drops, 0);
    }

    /// Adds a stream, as [`add`](Self::add), of which a part is dropped already: as of others that one filter serves with it.
    pub fn add_dropping(&mut self, share: Share, most: u32, drops: u32, rate: u32) {
        let most = most.min(MOST);
        self.streams.push(State { share, most, drops, rate: rate.min(most), in_vain: 0 });
    }

    /// Changes the share of a stream and the most that is dropped of it; returns whether its rate is another one now.
    pub fn set(&mut self, stream: usize, share: Share, most: u32) -> bool {
        let Some(state) = self.streams.get_mut(stream) else { return false };
        let before = state.rate;
        (state.share, state.most) = (share, most.min(MOST));
        state.rate = state.rate.min(state.most);
        state.rate != before
    }

    /// Removes a stream; those behind it move up by one.
    pub fn remove(&mut self, stream: usize) {
        if stream < self.streams.len() {
            self.streams.remove(stream);
        }
    }

    /// Returns the part of a stream that is dropped early, of 2^32.
    #[must_use]
    pub fn rate(&self, stream: usize) -> u32 {
        self.streams.get(stream).map_or(0, |state| state.rate)
    }

    /// Decides from the loads, one for each stream; returns which rates have changed.
    pub fn step(&mut self, loads: &[Load]) -> Vec<usize> {
        let before: Vec<u32> = self.streams.iter().map(|state| state.rate).collect();
        let suffers: Vec<bool> = self
            .streams
            .iter_mut()
            .zip(loads)
            .map(|(state, load)| state.suffers(load) && state.in_vain < PATIENCE)
            .collect();
        let highest = self
            .streams
            .iter()
            .zip(&suffers)
            .filter(|(_, suffers)| **suffers)
            .map(|(state, _)| state.share)
            .max();
        match highest {
            None => self.streams.iter_mut().for_each(State::relax),
            Some(share) => self.relieve(share, &suffers),
        }
        let changed = |(index, old): (usize, &u32)| (self.streams.get(index)?.rate != *old).then_some(index);
        before.iter().enumerate().filter_map(changed).collect()
    }

    /// Drops more of what has a lower share than the sufferer: of the lowest that is not at the most yet. Where there is none, the
    /// sufferers of the lowest share themselves.
    fn relieve(&mut self, sufferer: Share, suffers: &[bool]) {
        let lower = self.streams.iter().filter(|state| state.share < sufferer && state.rate < state.most);
        if let Some(lowest) = lower.map(|state| state.share).min() {
            let of_lowest = self.streams.iter_mut().filter(|state| state.share == lowest);
            of_lowest.for_each(State::tighten);
            return;
        }
        for (state, _) in self.streams.iter_mut().zip(suffers).filter(|(_, suffers)| **suffers) {
            state.in_vain += u32::from(state.share == sufferer);
        }
        if self.for_others_only {
            return;
        }
        let lowest = self.streams.iter().map(|state| state.share).min();
        for (state, _) in self.streams.iter_mut().zip(suffers).filter(|(_, suffers)| **suffers) {
            if Some(state.share) == lowest {
                state.tighten();
            }
        }
    }
}

impl State {
    /// Returns whether it lost what its filter did not drop, or is about to.
    ///
    /// A filter's drops and others are one number in the kernel. While the rate is not zero, a full queue alone is counted.
    fn suffers(&mut self, load: &Load) -> bool {
        let lost = load.drops.wrapping_sub(self.drops);
        self.drops = load.drops;
        let suffers = (self.rate == 0 && lost > 0) || load.queued > load.limit / 4;
        if !suffers {
            self.in_vain = 0;
        }
        suffers
    }

    fn tighten(&mut self) {
        let passed = u32::MAX - self.rate;
        self.rate = self.rate.saturating_add((passed / 2).max(1)).min(self.most);
    }

    fn relax(&mut self) {
        let rate = self.rate - self.rate / 32;
        self.rate = if rate < LEAST { 0 } else { rate };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Receivers of one processor, which processes so many packets of 1 KiB in a step: the highest share first.
    struct Machine {
        capacity: u32,
        queued: Vec<u32>,
        drops: Vec<u32>,
        delivered: Vec<u32>,
    }

    const ROOM: u32 = 256;

    impl Machine {
        fn new(streams: usize, capacity: u32) -> Self {
            Self { capacity, queued: vec![0; streams], drops: vec![0; streams], delivered: vec![0; streams] }
        }

        /// Packets arrive in equal numbers. Each that is queued costs a tenth of a packet's work; the streams take turns.
        fn step(&mut self, arriving: &[u32], steering: &Steering) {
            let mut work = self.capacity * 10;
            for (index, count) in arriving.iter().enumerate() {
                let early = (u64::from(*count) * u64::from(steering.rate(index))) >> 32;
                let early = u32::try_from(early).unwrap();
                let queued = (count - early).min(ROOM - self.queued[index]);
                self.queued[index] += queued;
                self.drops[index] += count - queued;
                work = work.saturating_sub(queued);
            }
            let all: u32 = self.queued.iter().sum();
            let done = (work / 10).min(all);
            for index in 0..self.queued.len() {
                let part = self.queued[index] * done / all.max(1);
                self.queued[index] -= part;
                self.delivered[index] += part;
            }
        }

        fn loads(&self) -> Vec<Load> {
            let load = |index: usize| Load {
                queued: self.queued[index] << 10,
                limit: ROOM << 10,
                drops: self.drops[index],
            };
            (0..self.queued.len()).map(load).collect()
        }
    }

    /// Runs a machine under load; returns what each stream got in the second half, of all that arrived there.
    fn run(shares: &[Share], arriving: &[u32], capacity: u32) -> (Vec<f64>, Vec<u32>) {
        let mut machine = Machine::new(shares.len(), capacity);
        let mut steering = Steering::new(shares);
        for _ in 0..300 {
            machine.step(arriving, &steering);
            steering.step(&machine.loads());
        }
        let (before, drops) = (machine.delivered.clone(), machine.drops.clone());
        for _ in 0..300 {
            machine.step(arriving, &steering);
            steering.step(&machine.loads());
        }
        let part = |index: usize| {
            f64::from(machine.delivered[index] - before[index]) / f64::from(arriving[index] * 300)
        };
        let lost = (0..shares.len()).map(|index| machine.drops[index] - drops[index]).collect();
        ((0..shares.len()).map(part).collect(), lost)
    }

    #[test]
    fn the_highest_share_loses_nothing_in_an_overload() {
        let (got, lost) = run(&[100, 50, 1, 1], &[100; 4], 250);
        assert_eq!(lost[0], 0, "{got:?}");
        assert!(got[0] > 0.99 && got[0] >= got[1] && got[1] > got[2], "{got:?}");
        // Without shares, the same machine drops of everybody.
        let (equal, _) = run(&[1; 4], &[100; 4], 250);
        assert!(equal.iter().all(|part| *part < 0.7), "{equal:?}");
    }

    #[test]
    fn nobody_loses_where_there_is_enough() {
        let (got, lost) = run(&[100, 50, 1, 1], &[50; 4], 250);
        assert_eq!(lost, [0; 4], "{got:?}");
    }

    #[test]
    fn a_stream_gets_its_packets_back() {
        let mut steering = Steering::new(&[2, 1]);
        let full = Load { queued: 9, limit: 10, drops: 0 };
        assert_eq!(steering.step(&[full, Load::default()]), [1]);
        for _ in 0..20 {
            steering.step(&[full, Load::default()]);
        }
        assert!(steering.rate(1) > u32::MAX / 10 * 9 && steering.rate(0) == 0);
        let calm = Load { queued: 0, limit: 10, drops: 0 };
        for _ in 0..240 {
            steering.step(&[calm; 2]);
        }
        assert_eq!(steering.rate(1), 0);
        assert!(steering.step(&[calm; 2]).is_empty());
    }

    const FULL: Load = Load { queued: 9, limit: 10, drops: 0 };
    const CALM: Load = Load { queued: 0, limit: 10, drops: 0 };

    #[test]
    fn no_more_is_dropped_of_a_stream_than_its_most() {
        let mut steering = Steering::for_others_only();
        steering.add(9, 0, 0);
        steering.add(5, u32::MAX / 2, 0);
        steering.add(0, u32::MAX, 0);
        for _ in 0..50 {
            steering.step(&[FULL, CALM, CALM]);
        }
        assert_eq!([0, 1, 2].map(|stream| steering.rate(stream)), [0, u32::MAX / 2, MOST]);
        assert!(steering.set(1, 5, u32::MAX / 4) && steering.rate(1) == u32::MAX / 4);
        steering.remove(1);
        assert_eq!(steering.rate(1), MOST);
    }

    #[test]
    fn a_stream_of_the_lowest_share_is_left_alone_where_only_others_count() {
        let mut steering = Steering::for_others_only();
        steering.add(1, u32::MAX, 0);
        steering.add(0, u32::MAX, 0);
        for _ in 0..50 {
            assert!(steering.step(&[CALM, FULL]).is_empty());
        }
        // What was lost before it was added is no loss.
        steering.add(1, u32::MAX, 7);
        assert!(steering.step(&[CALM, CALM, Load { drops: 7, ..CALM }]).is_empty());
    }

    /// A receiver that never receives has others' packets dropped for so long only; one that recovers counts again.
    #[test]
    fn who_is_not_helped_is_no_reason_to_drop() {
        let mut steering = Steering::for_others_only();
        steering.add(1, 0, 0);
        steering.add(0, u32::MAX, 0);
        for _ in 0..20 {
            steering.step(&[FULL, CALM]);
        }
        assert_eq!(steering.rate(1), MOST);
        for _ in 0..400 {
            steering.step(&[FULL, CALM]);
        }
        assert_eq!(steering.rate(1), 0);
        steering.step(&[CALM, CALM]);
        assert_eq!(steering.step(&[FULL, CALM]), [1]);
    }

    proptest! {
        /// Nobody's packets are dropped early for a stream with a lower share, whatever the loads.
        #[test]
        fn nobody_suffers_for_a_lower_share(
            shares in prop::collection::vec(0..4_u32, 1..6),
            loads in prop::collection::vec(prop::collection::vec((0..20_u32, 0..3_u32), 6), 1..40),
        ) {
            let mut steering = Steering::new(&shares);
            let mut drops = vec![0_u32; shares.len()];
            for step in loads {
                let before: Vec<u32> = (0..shares.len()).map(|index| steering.rate(index)).collect();
                let load = |(index, (queued, lost)): (usize, &(u32, u32))| {
                    drops[index] = drops[index].wrapping_add(*lost);
                    Load { queued: *queued, limit: 20, drops: drops[index] }
                };
                let now: Vec<Load> = step.iter().take(shares.len()).enumerate().map(load).collect();
                steering.step(&now);
                for index in 0..shares.len() {
                    prop_assert!(steering.rate(index) <= MOST);
                    if steering.rate(index) > before[index] {
                        let lowest = shares.iter().min() == Some(&shares[index]);
                        let for_another = (0..shares.len()).any(|other| {
                            shares[other] > shares[index] && (now[other].queued > 5 || step[other].1 > 0)
                        });
                        let for_itself = lowest && (now[index].queued > 5 || step[index].1 > 0);
                        prop_assert!(for_another || for_itself);
                    }
                }
            }
        }
    }
}
