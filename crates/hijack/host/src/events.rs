//! Reading the journal: single calls, as executives have written them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicUsize, fence};
use std::time::{Duration, Instant};

use orrery_hijack_image::journal::{
    ANSWERED, CALLERS, ENTERED, ENTRIES, EVENT, Entry, Journal, RESUMED, SIGNAL, Slot, stamp_of,
};
use rustix::io::Errno;
use rustix::thread::futex::{self, Flags, Timespec, Wait, WaitFlags, WaitPtr, WaitvFlags};
use rustix::time::{ClockId, clock_gettime};

use crate::error::Result;
use crate::shared_segment::{ForeignJournal, SharedSegment, UserMemory};

/// A slot that stays unwritten so long, with others behind it, was given up by its writer.
const PATIENCE: Duration = Duration::from_secs(1);

/// One call.
#[derive(Debug, Clone)]
pub struct Event {
    entry: Entry,
}

/// What an event says of its call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The call begins. If it returns, its result is another event.
    Entered,
    /// The call was performed.
    Done,
    /// A rule of the policy gave the result.
    Answered,
    /// A call of this thread that began before has returned: nothing but the result is known.
    Resumed,
    /// No call: a handler of the program's got a signal.
    Signal,
    /// No result: a rule's handler reports something about the call, see [`Event::report`].
    Report,
}

impl Event {
    pub(crate) fn of(entry: Entry) -> Self {
        Self { entry }
    }

    /// Returns the thread that made the call.
    pub fn thread(&self) -> u32 {
        self.entry.thread
    }

    /// Returns the number of the system call, or of the signal that arrived.
    pub fn number(&self) -> u32 {
        self.entry.number
    }

    /// Returns what a rule's handler reports, if this is such an event.
    pub fn report(&self) -> Option<&[u8]> {
        self.entry.piece(0).filter(|_| self.entry.state == EVENT)
    }

    /// Returns what is known of it.
    pub fn state(&self) -> State {
        match self.entry.state {
            ENTERED => State::Entered,
            ANSWERED => State::Answered,
            RESUMED => State::Resumed,
            SIGNAL => State::Signal,
            EVENT => State::Report,
            _ => State::Done,
        }
    }

    /// As the program gave them.
    pub fn arguments(&self) -> [u64; 6] {
        self.entry.arguments
    }

    /// Returns the result of the call.
    pub fn result(&self) -> i64 {
        self.entry.result
    }

    /// Returns the time stamp counter when it began.
    pub fn start(&self) -> u64 {
        self.entry.start
    }

    /// Ticks that it took.
    pub fn ticks(&self) -> u64 {
        self.entry.ticks
    }

    /// Returns when it was written, as near as is known.
    fn end(&self) -> u64 {
        self.entry.start.saturating_add(self.entry.ticks)
    }

    /// Returns which of the policy's rules asked for it, from zero.
    pub fn rule(&self) -> u32 {
        self.entry.rule
    }

    /// Returns where it came from, as one number; zero where that was not asked for.
    pub fn site(&self) -> u64 {
        self.entry.site
    }

    /// The address behind the call instruction, and return addresses, nearest first; zeros where fewer were found.
    pub fn callers(&self) -> [u64; CALLERS] {
        self.entry.callers
    }

    /// The memory that an argument points to, or its beginning, if it was looked at: a path, an address, a buffer.
    pub fn memory(&self, argument: usize) -> Option<&[u8]> {
        self.entry.piece(argument)
    }
}

/// Where a journal is.
#[derive(Debug)]
enum Source {
    /// In a run of this process.
    Own(Arc<UserMemory>),
    /// In that of another one, which does not wait for this reader.
    Foreign { journal: ForeignJournal, _permit: Option<QuotaPermit> },
}

impl Source {
    fn journal(&self) -> &Journal {
        match self {
            Self::Own(memory) => memory.journal(),
            Self::Foreign { journal, .. } => journal.journal(),
        }
    }
}

/// How many journals of further identities all who share it may read, of runs of other processes: each is some megabytes of the reader's
/// memory.
#[derive(Debug, Clone)]
pub struct JournalQuota(Arc<AtomicUsize>);

impl JournalQuota {
    /// Returns a quota of so many.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self(Arc::new(AtomicUsize::new(most)))
    }

    fn take(&self) -> Option<QuotaPermit> {
        let taken = self.0.fetch_update(AcqRel, Acquire, |left| left.checked_sub(1));
        taken.ok().map(|_| QuotaPermit(self.clone()))
    }
}

/// A part of a [`JournalQuota`], which is given back when this is dropped.
#[derive(Debug)]
struct QuotaPermit(JournalQuota);

impl Drop for QuotaPermit {
    fn drop(&mut self) {
        self.0.0.fetch_add(1, AcqRel);
    }
}

/// Where further journals are found: identities have journals of their own, which appear with them.
#[derive(Debug)]
enum Directory {
    /// In this process's own record.
    Own(Arc<SharedSegment>),
    /// In the first journal, as the supervisor has announced them there.
    Foreign {
        /// The user who has made them all.
        owner: u32,
        quota: JournalQuota,
        /// How many were looked at.
        looked: usize,
    },
}

/// Reads events. While there is a reader, programs wait for it rather than lose their calls.
#[derive(Debug)]
pub struct Events {
    directory: Directory,
    journals: Vec<JournalReader>,
    /// What the first journal said about how many further ones there are, when they were looked for.
    further: u32,
    /// How many events of each journal are due: see [`Events::collect`].
    due: usize,
}

/// Reads one journal.
#[derive(Debug)]
struct JournalReader {
    source: Source,
    next: u64,
    /// Since when the next slot is not written.
    missing: Option<Instant>,
    given_up: u64,
    /// A program has written nonsense there: nothing more is read.
    broken: bool,
    /// What was read, and waits for events of other journals that come before.
    read: VecDeque<Event>,
}

impl JournalReader {
    fn new(source: Source) -> Self {
        let next = source.journal().read.load(Relaxed);
        Self { source, next, missing: None, given_up: 0, broken: false, read: VecDeque::new() }
    }

    /// Reads a journal whose writers wait for this.
    fn of(memory: Arc<UserMemory>) -> Self {
        memory.journal().reader.store(std::process::id(), Relaxed);
        Self::new(Source::Own(memory))
    }

    fn slot(&self) -> &Slot {
        &self.source.journal().slots[usize::try_from(self.next).unwrap_or(0) % ENTRIES]
    }

    /// Reads as much as there is, but not for ever. Returns how much waits.
    fn collect(&mut self) -> usize {
        while self.read.len() < ENTRIES
            && let Some(event) = self.take()
        {
            self.read.push_back(event);
        }
        self.read.len()
    }

    fn take(&mut self) -> Option<Event> {
        let journal = self.source.journal();
        while !self.broken {
            let slot = &journal.slots[usize::try_from(self.next).unwrap_or(0) % ENTRIES];
            let turn = stamp_of(self.next);
            if slot.stamp.load(Acquire) == turn + 1 {
                let words = std::array::from_fn(|index| slot.words[index].load(Relaxed));
                slot.stamp.store(turn + 2, std::sync::atomic::Ordering::Release);
                self.missing = None;
                self.next += 1;
                journal.read.store(self.next, Relaxed);
                return Some(Event { entry: Entry::from_words(&words) });
            }
            if journal.next.load(Acquire) == self.next {
                self.missing = None;
                return None;
            }
            if self.missing.get_or_insert_with(Instant::now).elapsed() < PATIENCE {
                return None;
            }
            // Its writer may still be at it: then it finds out that nobody waits.
            if slot.stamp.compare_exchange(turn, turn + 2, AcqRel, Acquire).is_ok() {
                self.given_up += 1;
                self.missing = None;
                self.next += 1;
                journal.read.store(self.next, Relaxed);
            } else if slot.stamp.load(Acquire) != turn + 1 {
                self.broken = true;
                self.given_up += 1;
                journal.reader.store(0, Relaxed);
            }
        }
        None
    }
}

impl Events {
    pub(crate) fn new(segment: Arc<SharedSegment>) -> Self {
        let mut events =
            Self { directory: Directory::Own(segment), journals: Vec::new(), further: 0, due: 0 };
        events.look_for_journals();
        events
    }

    /// Reads the journals of a run that another process has started, as [`Hijack::journal`](crate::Hijack::journal)
    /// names them there: that of the first program's identity, and those of further ones, as long as `quota` allows. `owner` is the user
    /// who started the run. Programs do not wait for this reader: what finds no room is lost, and counted.
    ///
    /// # Errors
    /// [`Error::Facility`](crate::Error::Facility): there is no such segment, it is none of a run, or it is another
    /// user's.
    pub fn attach(id: i32, owner: u32, quota: &JournalQuota) -> Result<Self> {
        let first = JournalReader::new(Source::Foreign {
            journal: ForeignJournal::attach(id, owner)?,
            _permit: None,
        });
        let directory = Directory::Foreign { owner, quota: quota.clone(), looked: 0 };
        Ok(Self { directory, journals: vec![first], further: 0, due: 0 })
    }

    /// Sleeps until there may be an event, for `most` at most.
    pub fn wait(&self, most: Duration) {
        let Some(first) = self.journals.first().filter(|_| self.due == 0) else { return };
        let readers = || self.journals.iter().filter(|reader| !reader.broken);
        readers().for_each(|reader| reader.source.journal().waiting.store(1, Relaxed));
        // Who writes an entry does so before it looks whether a reader sleeps.
        fence(SeqCst);
        // Not whether it has taken its ticket: one that was preempted in between would never run beside a reader that
        // does not sleep.
        let is_written =
            |reader: &JournalReader| reader.slot().stamp.load(Acquire) == stamp_of(reader.next) + 1;
        let further = &first.source.journal().further;
        if !readers().any(is_written) && further.load(Acquire) == self.further {
            let words = readers().map(|reader| (&reader.source.journal().waiting, 1));
            sleep(words.chain([(further, self.further)]), most);
        }
        readers().for_each(|reader| reader.source.journal().waiting.store(0, Relaxed));
    }

    /// Events that were lost: their writers died, or found the journal full for too long.
    pub fn lost(&self) -> u64 {
        let lost = |reader: &JournalReader| {
            let lost = if reader.broken { 0 } else { reader.source.journal().lost.load(Relaxed) };
            reader.given_up.saturating_add(lost)
        };
        self.journals.iter().map(lost).fold(0, u64::saturating_add)
    }

    /// Looks whether there are further identities, which have journals of their own.
    fn look_for_journals(&mut self) {
        let further = |reader: &JournalReader| reader.source.journal().further.load(Acquire);
        self.further = self.journals.first().map_or(0, further);
        match &mut self.directory {
            Directory::Own(segment) => {
                let known = self.journals.len();
                self.journals.extend(segment.users().into_iter().skip(known).map(JournalReader::of));
            }
            Directory::Foreign { owner, quota, looked } => {
                let Some(first) = self.journals.first() else { return };
                let announced = &first.source.journal().segments;
                let count = usize::try_from(self.further).unwrap_or(0).min(announced.len());
                let new = announced.get(*looked..count).unwrap_or_default();
                let new: Vec<u32> = new.iter().map(|segment| segment.load(Relaxed)).collect();
                *looked = count.max(*looked);
                // One that cannot be read is passed over: who writes there can write anything.
                let attach = |segment: u32| {
                    let permit = quota.take()?;
                    let journal = ForeignJournal::attach(i32::try_from(segment).ok()?, *owner).ok()?;
                    Some(JournalReader::new(Source::Foreign { journal, _permit: Some(permit) }))
                };
                self.journals.extend(new.into_iter().filter_map(attach));
            }
        }
    }

    /// Reads all journals, so that events of different ones come in their order: a thread that becomes another user
    /// goes on in another journal. What came before an event of a first round is there in a second one, at the latest.
    fn collect(&mut self) {
        self.look_for_journals();
        self.due = self.journals.iter_mut().map(JournalReader::collect).sum();
        if self.due == 0 {
            return;
        }
        let last = |reader: &JournalReader| reader.read.back().map(Event::end);
        let last = self.journals.iter().filter_map(last).max();
        self.look_for_journals();
        for reader in &mut self.journals {
            let before = reader.read.len();
            reader.collect();
            let added = reader.read.iter().skip(before);
            self.due += added.take_while(|event| Some(event.end()) <= last).count();
        }
    }
}

/// Sleeps while all words have these values, for `most` at most. However it ends, the caller looks again.
fn sleep<'a>(words: impl Iterator<Item = (&'a AtomicU32, u32)>, most: Duration) {
    /// How often it is looked where the kernel waits for one word only (before Linux 5.16).
    const SHORT: Duration = Duration::from_millis(2);
    const LONG: Duration = Duration::from_secs(3600);
    let most = most.min(LONG);
    let words: Vec<(&AtomicU32, u32)> = words.collect();
    let waiters: Vec<Wait> = words
        .iter()
        .map(|(word, value)| {
            let mut wait = Wait::new();
            wait.val = u64::from(*value);
            wait.uaddr = WaitPtr::new(word.as_ptr().cast());
            wait.flags = WaitFlags::SIZE_U32;
            wait
        })
        .collect();
    let Ok(length) = Timespec::try_from(most) else { return };
    let until = clock_gettime(ClockId::Monotonic) + length;
    match futex::waitv(&waiters, WaitvFlags::empty(), Some(&until), ClockId::Monotonic) {
        Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
        Err(_) => {
            let [(word, value), rest @ ..] = &words[..] else { return };
            // The last word is not one of entries: whoever appears is found a little later.
            let most = if rest.len() > 1 { most.min(SHORT) } else { most };
            let _ended = futex::wait(word, Flags::empty(), *value, Timespec::try_from(most).ok().as_ref());
        }
    }
}

impl Iterator for Events {
    type Item = Event;

    /// The next event, if there is one by now. There may be one later.
    fn next(&mut self) -> Option<Event> {
        if self.due == 0 {
            self.collect();
        }
        self.due = self.due.checked_sub(1)?;
        let first = |reader: &&mut JournalReader| reader.read.front().map(Event::end);
        let ready = self.journals.iter_mut().filter(|reader| !reader.read.is_empty());
        ready.min_by_key(first)?.read.pop_front()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        for reader in &self.journals {
            if let Source::Own(memory) = &reader.source {
                memory.journal().reader.store(0, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use orrery_hijack_image::journal::DONE;
    use orrery_hijack_image::users::Identity;
    use orrery_sys::seccomp::{Action, Filter, Number, Scope, install};

    use super::*;

    fn write(segment: &SharedSegment, ticket: u64, number: u32) {
        write_to(segment.first().journal(), ticket, number);
    }

    fn write_to(journal: &Journal, ticket: u64, number: u32) {
        let slot = &journal.slots[usize::try_from(ticket).unwrap() % ENTRIES];
        assert_eq!(slot.stamp.load(Relaxed), stamp_of(ticket));
        let entry = Entry { number, state: DONE, ..Entry::EMPTY };
        for (place, word) in slot.words.iter().zip(entry.words()) {
            place.store(*word, Relaxed);
        }
        slot.stamp.store(stamp_of(ticket) + 1, Relaxed);
    }

    #[test]
    fn events_come_in_order_around_the_ring() {
        let segment = Arc::new(SharedSegment::new().unwrap());
        let mut events = Events::new(Arc::clone(&segment));
        assert!(events.next().is_none());
        for ticket in 0..3 * ENTRIES as u64 {
            write(&segment, ticket, u32::try_from(ticket).unwrap());
            segment.first().journal().next.store(ticket + 1, Relaxed);
            assert_eq!(events.next().map(|event| event.number()), u32::try_from(ticket).ok());
        }
        assert!(events.next().is_none());
        assert_eq!(events.lost(), 0);
    }

    /// A program that shares a journal can write anything there. That costs its entries, and not the reader's.
    #[test]
    fn nonsense_in_a_journal_ends_nothing_but_that() {
        let segment = Arc::new(SharedSegment::new().unwrap());
        let mut events = Events::new(Arc::clone(&segment));
        let journal = segment.first().journal();
        journal.next.store(u64::MAX, Relaxed);
        for slot in &journal.slots {
            slot.stamp.store(0xa5a5_a5a5_a5a5_a5a5, Relaxed);
        }
        journal.lost.store(u64::MAX, Relaxed);
        assert!(events.next().is_none());
        std::thread::sleep(PATIENCE + Duration::from_millis(10));
        assert!(events.next().is_none() && events.next().is_none());
        assert_eq!((events.lost(), journal.reader.load(Relaxed)), (1, 0));
    }

    #[test]
    fn a_sleeping_reader_of_another_run_is_woken() {
        let segment = Arc::new(SharedSegment::new().unwrap());
        let user = rustix::process::geteuid().as_raw();
        let quota = JournalQuota::new(0);
        assert!(
            Events::attach(segment.first().journal_id(), user + 1, &quota).is_err()
                && Events::attach(-1, user, &quota).is_err()
        );
        assert!(Events::attach(segment.verdicts_id(), user, &quota).is_err());
        let mut events = Events::attach(segment.first().journal_id(), user, &quota).unwrap();
        let writer = std::thread::spawn({
            let segment = Arc::clone(&segment);
            move || {
                let journal = segment.first().journal();
                while journal.waiting.load(Acquire) == 0 {
                    std::thread::yield_now();
                }
                write(&segment, 0, 7);
                journal.next.store(1, Relaxed);
                fence(SeqCst);
                if journal.waiting.swap(0, Relaxed) != 0 {
                    futex::wake(&journal.waiting, Flags::empty(), 1).unwrap();
                }
            }
        });
        while events.next().is_none_or(|event| event.number() != 7) {
            events.wait(Duration::from_secs(60));
        }
        writer.join().unwrap();
        // No writer waits for this reader.
        assert_eq!(segment.first().journal().reader.load(Relaxed), 0);
    }

    fn identity(user: u32) -> Identity {
        Identity { users: [user; 3], groups: [user; 3], capabilities: 0 }
    }

    /// Adds an identity, with an entry in its journal.
    fn appear(segment: &SharedSegment, user: u32) {
        let prepare = |_: usize, memory: &Arc<UserMemory>| {
            // So that who has made it may still attach it, whoever that is.
            memory.journal().next.store(1, Relaxed);
            write_to(memory.journal(), 0, user);
        };
        segment.add(&identity(user), prepare).unwrap();
    }

    #[test]
    fn a_reader_of_another_run_has_the_journals_of_identities_that_appear() {
        let segment = Arc::new(SharedSegment::new().unwrap());
        let owner = rustix::process::geteuid().as_raw();
        segment.enter_first(&identity(1));
        let quota = JournalQuota::new(2);
        let mut events = Events::attach(segment.first().journal_id(), owner, &quota).unwrap();
        assert!(events.next().is_none());
        let adder = std::thread::spawn({
            let segment = Arc::clone(&segment);
            move || {
                while segment.first().journal().waiting.load(Acquire) == 0 {
                    std::thread::yield_now();
                }
                appear(&segment, 2);
            }
        });
        // Nothing wakes it but the new identity.
        events.wait(Duration::from_secs(60));
        adder.join().unwrap();
        assert_eq!(events.next().map(|event| event.number()), Some(2));
        // An entry of the further journal wakes it as well as one of the first.
        let further = segment.users().pop().unwrap();
        let writer = std::thread::spawn(move || {
            let journal = further.journal();
            while journal.waiting.load(Acquire) == 0 {
                std::thread::yield_now();
            }
            write_to(journal, 1, 7);
            journal.next.store(2, Relaxed);
            fence(SeqCst);
            if journal.waiting.swap(0, Relaxed) != 0 {
                futex::wake(&journal.waiting, Flags::empty(), 1).unwrap();
            }
        });
        let begin = Instant::now();
        while events.next().is_none_or(|event| event.number() != 7) {
            events.wait(Duration::from_secs(60));
        }
        writer.join().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(50), "it was woken by nothing");
        // The quota allows one more, and not two.
        appear(&segment, 3);
        appear(&segment, 4);
        assert_eq!(events.next().map(|event| event.number()), Some(3));
        assert!(events.next().is_none());
        drop(events);
        assert!(quota.take().is_some_and(|_first| quota.take().is_some()), "what was taken is given back");
    }

    /// Who can write to the first journal announces what it likes: segments that are none, and the same one again.
    #[test]
    fn what_is_announced_is_looked_at_once() {
        let segment = Arc::new(SharedSegment::new().unwrap());
        let owner = rustix::process::geteuid().as_raw();
        let quota = JournalQuota::new(8);
        let mut events = Events::attach(segment.first().journal_id(), owner, &quota).unwrap();
        let journal = segment.first().journal();
        journal.segments[0].store(u32::MAX, Relaxed);
        journal.segments[1].store(u32::try_from(segment.verdicts_id()).unwrap(), Relaxed);
        for count in [2, u32::MAX, 0, 1, u32::MAX] {
            journal.further.store(count, Relaxed);
            assert!(events.next().is_none());
        }
        assert_eq!(events.journals.len(), 1);
        // And then it sleeps.
        let begin = Instant::now();
        events.wait(Duration::from_millis(20));
        assert!(begin.elapsed() >= Duration::from_millis(20));
    }

    /// Before Linux 5.16, or where a filter refuses the call.
    #[test]
    fn without_a_wait_for_several_words_all_are_looked_at_often() {
        let limited = std::thread::spawn(|| {
            let mut filter = Filter::new(Action::Allow);
            filter.set(Number(449), Action::Fail(Errno::NOSYS));
            rustix::thread::set_no_new_privs(true).unwrap();
            install(&filter.program(), Scope::Thread).unwrap();
            let words = [1, 1, 0].map(AtomicU32::new);
            let elapsed = |words: &[(&AtomicU32, u32)], most| {
                let begin = Instant::now();
                sleep(words.iter().copied(), most);
                begin.elapsed()
            };
            let [first, second, further] = &words;
            let (long, short) = (Duration::from_secs(60), Duration::from_millis(20));
            // Two journals, of which the second wakes nobody; one alone; and one that has been written to.
            assert!(elapsed(&[(first, 1), (second, 1), (further, 0)], long) < long / 2);
            assert!(elapsed(&[(first, 1), (further, 0)], short) >= short);
            first.store(0, Relaxed);
            assert!(elapsed(&[(first, 1), (further, 0)], long) < long / 2);
        });
        limited.join().unwrap();
    }

    #[test]
    fn a_reader_sleeps_while_a_writer_has_only_its_ticket() {
        let segment = Arc::new(SharedSegment::new().unwrap());
        let owner = rustix::process::geteuid().as_raw();
        let mut events = Events::attach(segment.first().journal_id(), owner, &JournalQuota::new(0)).unwrap();
        segment.first().journal().next.store(1, Relaxed);
        let begin = Instant::now();
        events.wait(Duration::from_millis(20));
        assert!(begin.elapsed() >= Duration::from_millis(20), "it would keep the writer from the CPU");
        write(&segment, 0, 7);
        events.wait(Duration::from_secs(60));
        assert_eq!(events.next().map(|event| event.number()), Some(7));
    }

    #[test]
    fn a_slot_that_nobody_writes_is_passed_over() {
        let segment = Arc::new(SharedSegment::new().unwrap());
        let mut events = Events::new(Arc::clone(&segment));
        segment.first().journal().next.store(2, Relaxed);
        write(&segment, 1, 7);
        assert!(events.next().is_none());
        std::thread::sleep(PATIENCE + Duration::from_millis(10));
        assert_eq!(events.next().map(|event| event.number()), Some(7));
        assert_eq!(events.lost(), 1);
    }
}
