//! The control block: memory that both sides write, for the few things that neither can say alone.
//!
//! - A **claim** per queue slot decides a race: main cancels a waiting call, or the orbit takes it, whichever exchanges
//!   the word first.
//! - The **crash record**: what the orbit's signal handler noted about its own death.
//! - Whether it is ready, and how many updates it has sent.
//!
//! Main believes none of it further than it harms itself: claims that contradict one another or what main knows are a
//! corrupted queue ([`crate::state`]), a crash record is shown to humans, the count of updates only says when to look at the
//! socket.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use orrery_domain::{Result, SharedMemory};

use crate::error::Fault;

const TEXT: usize = 256;

/// What a claim says of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// The call is queued.
    Queued,
    /// The orbit has it.
    Taken,
    /// Main does not want it any more.
    Cancelled,
    /// Something that is never written.
    Nonsense,
}

/// Kinds of crash records.
const SIGNAL: u32 = 1;
const PANIC: u32 = 2;
const SNAPSHOT: u32 = 3;
const QUEUE: u32 = 4;
const EXCEPTION: u32 = 5;

#[repr(C)]
struct Layout {
    ready: AtomicU32,
    updates_sent: AtomicU32,
    kind: AtomicU32,
    signal: AtomicU32,
    address: AtomicU64,
    instruction: AtomicU64,
    started: AtomicU64,
    has_address: AtomicU32,
    text_len: AtomicU32,
    text: [AtomicU64; TEXT / 8],
}

const CLAIMS: usize = size_of::<Layout>();

/// The control block of one orbit.
#[derive(Debug)]
pub(crate) struct ControlBlock {
    memory: SharedMemory,
    slots: u32,
}

impl ControlBlock {
    /// For a queue with so many slots, a power of two.
    pub(crate) fn new(slots: u32) -> Result<Self> {
        let memory = SharedMemory::for_domains("orrery-control", CLAIMS + slots as usize * 4)?;
        Ok(Self { memory, slots })
    }

    /// Returns the memory, which the orbit inherits.
    pub(crate) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    fn layout(&self) -> &Layout {
        // SAFETY: the memory begins with a layout, zeroed at first; all of it is atomics.
        unsafe { self.memory.start().cast::<Layout>().as_ref() }
    }

    fn claim_word(&self, number: u32) -> &AtomicU32 {
        let index = (number & (self.slots - 1)) as usize;
        // SAFETY: `new` made room for `slots` words behind the layout.
        unsafe { self.memory.start().add(CLAIMS).cast::<AtomicU32>().add(index).as_ref() }
    }

    fn word(number: u32, claim: Claim) -> u32 {
        number << 2
            | match claim {
                Claim::Queued => 1,
                Claim::Taken => 2,
                Claim::Cancelled => 3,
                Claim::Nonsense => 0,
            }
    }

    /// Main's: message `number` is about to be sent.
    pub(crate) fn open(&self, number: u32) {
        self.claim_word(number).store(Self::word(number, Claim::Queued), Ordering::SeqCst);
    }

    /// Returns what became of message `number`.
    pub(crate) fn claim(&self, number: u32) -> Claim {
        let word = self.claim_word(number).load(Ordering::SeqCst);
        [Claim::Queued, Claim::Taken, Claim::Cancelled]
            .into_iter()
            .find(|claim| Self::word(number, *claim) == word)
            .unwrap_or(Claim::Nonsense)
    }

    /// Main's, while no orbit lives: the successor is not to run message `number`.
    pub(crate) fn close(&self, number: u32) {
        self.claim_word(number).store(Self::word(number, Claim::Cancelled), Ordering::SeqCst);
    }

    /// Turns a waiting message into a `to`; false where the other side was faster.
    pub(crate) fn turn(&self, number: u32, to: Claim) -> bool {
        let (from, to) = (Self::word(number, Claim::Queued), Self::word(number, to));
        self.claim_word(number).compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// The orbit's: init is done.
    pub(crate) fn set_ready(&self) {
        self.layout().ready.store(1, Ordering::SeqCst);
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.layout().ready.load(Ordering::SeqCst) != 0
    }

    /// The orbit's: one more update was sent.
    pub(crate) fn count_update(&self) {
        self.layout().updates_sent.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn updates_sent(&self) -> u32 {
        self.layout().updates_sent.load(Ordering::SeqCst)
    }

    /// The orbit's: when the running task began, in nanoseconds of CLOCK_MONOTONIC.
    pub(crate) fn set_started(&self, now: u64) {
        self.layout().started.store(now, Ordering::Relaxed);
    }

    pub(crate) fn started(&self) -> u64 {
        self.layout().started.load(Ordering::Relaxed)
    }

    /// Main's, before a new instance starts.
    pub(crate) fn forget(&self) {
        let layout = self.layout();
        layout.ready.store(0, Ordering::SeqCst);
        layout.kind.store(0, Ordering::SeqCst);
    }

    /// The orbit's: a signal is about to end it. Async-signal-safe.
    pub(crate) fn note_signal(&self, signal: i32, address: Option<usize>, instruction: usize) {
        let layout = self.layout();
        layout.signal.store(signal.cast_unsigned(), Ordering::SeqCst);
        layout.address.store(address.unwrap_or(0) as u64, Ordering::SeqCst);
        layout.has_address.store(u32::from(address.is_some()), Ordering::SeqCst);
        layout.instruction.store(instruction as u64, Ordering::SeqCst);
        layout.kind.store(SIGNAL, Ordering::SeqCst);
    }

    /// The orbit's: it is about to end itself.
    fn note(&self, kind: u32, text: &str) {
        let layout = self.layout();
        let bytes = &text.as_bytes()[..text.len().min(TEXT)];
        for (word, chunk) in layout.text.iter().zip(bytes.chunks(8)) {
            let mut eight = [0; 8];
            eight[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_ne_bytes(eight), Ordering::Relaxed);
        }
        layout.text_len.store(u32::try_from(bytes.len()).unwrap_or(0), Ordering::SeqCst);
        layout.kind.store(kind, Ordering::SeqCst);
    }

    pub(crate) fn note_panic(&self, text: &str) {
        self.note(PANIC, text);
    }

    /// A C++ exception, by type and what it says.
    pub(crate) fn note_exception(&self, kind: &str, what: Option<&str>) {
        // A long type leaves room for what it says.
        let kind = &kind.as_bytes()[..kind.len().min(TEXT / 2)];
        let kind = String::from_utf8_lossy(kind);
        match what {
            Some(what) => self.note(EXCEPTION, &format!("{kind}\0{what}")),
            None => self.note(EXCEPTION, &kind),
        }
    }

    pub(crate) fn note_snapshot(&self, text: &str) {
        self.note(SNAPSHOT, text);
    }

    pub(crate) fn note_queue(&self, text: &str) {
        self.note(QUEUE, text);
    }

    /// Returns what the dead orbit noted, if anything.
    pub(crate) fn crash_record(&self) -> Option<Fault> {
        let layout = self.layout();
        let number = |word: &AtomicU64| usize::try_from(word.load(Ordering::SeqCst)).unwrap_or(0);
        let text = || {
            let len = (layout.text_len.load(Ordering::SeqCst) as usize).min(TEXT);
            let bytes: Vec<u8> = layout
                .text
                .iter()
                .flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes())
                .take(len)
                .collect();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        match layout.kind.load(Ordering::SeqCst) {
            SIGNAL => Some(Fault::Signal {
                signal: layout.signal.load(Ordering::SeqCst).cast_signed(),
                address: (layout.has_address.load(Ordering::SeqCst) != 0).then(|| number(&layout.address)),
                instruction: Some(number(&layout.instruction)),
                code: None,
                memory: None,
            }),
            EXCEPTION => {
                let text = text();
                let (kind, what) = match text.split_once('\0') {
                    Some((kind, what)) => (kind, Some(what.to_owned())),
                    None => (text.as_str(), None),
                };
                Some(Fault::Exception { kind: kind.to_owned(), what })
            }
            PANIC => Some(Fault::Panicked { message: text() }),
            SNAPSHOT => Some(Fault::Snapshot { reason: text() }),
            QUEUE => Some(Fault::Corrupted { what: text() }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_goes_to_one_side() {
        let control = ControlBlock::new(4).unwrap();
        control.open(9);
        assert_eq!(control.claim(9), Claim::Queued);
        assert!(control.turn(9, Claim::Cancelled));
        assert!(!control.turn(9, Claim::Taken));
        assert_eq!(control.claim(9), Claim::Cancelled);
        assert_eq!(control.claim(13), Claim::Nonsense, "another message in the same slot");
    }

    #[test]
    fn crash_records_are_read_back() {
        let control = ControlBlock::new(1).unwrap();
        assert_eq!(control.crash_record(), None);
        control.note_panic(&"ä".repeat(400));
        assert!(matches!(control.crash_record(), Some(Fault::Panicked { message }) if message.len() == 256));
        control.note_signal(11, Some(8), 0x1234);
        let fault = control.crash_record().unwrap();
        assert_eq!(fault.to_string(), "SIGSEGV at address 0x8 (instruction 0x1234)");
    }
}
