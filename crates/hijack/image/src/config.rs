//! What the supervisor writes into an image before it runs.

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

/// How many ranges of code an executive knows.
pub const RANGES: usize = 256;

/// `[start, end)`; both zero where unused.
#[repr(C)]
pub struct Range {
    /// The first address.
    pub start: AtomicU64,
    /// The address behind the last.
    pub end: AtomicU64,
    /// Which of the policy's patterns for callers its file matches: one bit each.
    pub marks: AtomicU64,
}

/// The `sigaction` of the kernel's own interface.
#[repr(C)]
#[derive(Debug)]
pub struct Action {
    /// `SIG_DFL`, `SIG_IGN` or a function.
    pub handler: AtomicU64,
    /// `SA_*`.
    pub flags: AtomicU64,
    /// Performs `rt_sigreturn`.
    pub restorer: AtomicU64,
    /// Further signals blocked while the handler runs.
    pub mask: AtomicU64,
}

impl Action {
    /// Returns its fields, in the kernel's order.
    #[must_use]
    pub fn fields(&self) -> [&AtomicU64; 4] {
        [&self.handler, &self.flags, &self.restorer, &self.mask]
    }
}

/// The image's exported `ORRERY_CONFIG`.
#[repr(C)]
pub struct Config {
    /// Where the shared page is attached.
    pub shared_page: AtomicU64,
    /// Where the counters of threads are attached; zero: they are not.
    pub counters: AtomicU64,
    /// Where the journal is attached; zero: it is not.
    pub journal: AtomicU64,
    /// The number of the segment of verdicts, which is attached for reading.
    pub verdicts_segment: AtomicU64,
    /// Where that is attached.
    pub verdicts: AtomicU64,
    /// Where the image is.
    pub image: AtomicU64,
    /// How long it is.
    pub image_length: AtomicU64,
    /// The image's code: calls from here are not dispatched.
    pub code: AtomicU64,
    /// How long that is.
    pub code_length: AtomicU64,
    /// Where the policy's table is; zero: there is none.
    pub policy: AtomicU64,
    /// Where the code of the policy's handlers is, behind its table.
    pub handlers: AtomicU64,
    /// How long that is, in whole pages; zero: there are none.
    pub handlers_length: AtomicU64,
    /// Which services answer calls: a set of [`service`].
    pub services: AtomicU64,
    /// How long receive calls look for a datagram before they block, in nanoseconds: of [`service::RECEIVE`].
    pub poll_receive: AtomicU64,
    /// Whether single calls are logged.
    pub logged: AtomicU8,
    /// Whether the process may be in another user namespace than the supervisor, and see other numbers of users.
    pub other_namespace: AtomicU8,
    /// Whether calls are counted.
    pub counted: AtomicU8,
    /// Whether threads may have counters of their own: programs can read `fs`, and hash it.
    pub thread_counters_enabled: AtomicU8,
    /// Whether they are timed: only where they are counted.
    pub timed: AtomicU8,
    /// Whether sites are left as they are.
    pub rewriting_disabled: AtomicU8,
    /// Set when the program installs a system-call filter: from then on, nothing is called that the program did not call.
    pub filtered: AtomicU8,
    /// Set when such a filter ends or traps who arms itself: children are not made tracees then.
    pub arming_forbidden: AtomicU8,
    /// Set when the program may not read the time stamp counter: nobody does, then.
    pub tsc_disabled: AtomicU8,
    /// Whether the program begins with SIGSYS blocked.
    pub sigsys_blocked: AtomicU8,
    /// Where the extended state of a signal frame has PKRU, in bytes; zero: the processor has no protection keys.
    pub protection_keys: AtomicU32,
    /// Whose page, counters and journal are attached: an index among [`crate::shared_page::Verdicts::users`]. Beyond: nobody else's.
    pub user: AtomicU32,
    /// A site is rewritten when so many of its calls were dispatched.
    pub threshold: AtomicU32,
    /// How SIGSYS is handled.
    pub action: Action,
    /// Private, read-only mappings of code from files.
    pub ranges: [Range; RANGES],
}

/// Services, one bit each.
pub mod service {
    /// Sleeps end on time.
    pub const SLEEP: u64 = 1;
    /// Threads that sleep get the highest priority that they may have.
    pub const REALTIME: u64 = 2;
    /// Who the process is, is remembered: its number, and those of its threads.
    pub const PROCESS: u64 = 4;
    /// As whom it acts is remembered: its user and group numbers.
    pub const USER: u64 = 8;
    /// File systems are seen where the kernel has none.
    pub const MOUNT: u64 = 16;
    /// Receive calls look for a datagram for a while before they block.
    pub const RECEIVE: u64 = 32;
}

/// What the executive's beginning is to do, one bit each.
pub mod boot {
    /// Have timers end without slack.
    pub const PRECISE: u64 = 1;
    /// The program runs already: take over its signal handlers, and leave its auxiliary vector.
    pub const RUNNING: u64 = 2;
    /// The program has the executive already: arm dispatch in this further thread of it alone.
    pub const THREAD: u64 = 4;
    /// With [`THREAD`]: the thread has SIGSYS blocked.
    pub const SIGSYS_BLOCKED: u64 = 8;
    /// Leave the program: restore its code and its handlers, and turn dispatch off. With [`THREAD`], turn it off in this further thread alone.
    pub const END: u64 = 16;
    /// A result of [`END`]: the thread has SIGSYS blocked.
    pub const SIGSYS_IS_BLOCKED: u64 = 1;
    /// A result of [`END`]: a SIGSYS was sent to the thread, or to the process, and is pending.
    pub const SIGSYS_IS_PENDING: u64 = 2;
}

/// What a thread finds on its stack that has attached the image's code, and begins with `orrery_load`: `bytes` for the image's data follow,
/// and then those of the policy's table.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Loading {
    /// Where the image's data is to be, behind its code.
    pub data: u64,
    /// How long that is with all that follows, in whole pages.
    pub data_length: u64,
    /// How many bytes it begins with; the others are zero.
    pub bytes: u64,
    /// Where the policy's table is to be, in the same memory.
    pub table: u64,
    /// How many bytes it has.
    pub table_bytes: u64,
    /// The page that is to be as it is in its file.
    pub page: u64,
    /// The first argument of `boot`.
    pub checked: u64,
    /// Its second argument: a set of [`boot`].
    pub options: u64,
    /// Its third argument: the stack pointer that the program has.
    pub stack: u64,
}

impl Loading {
    /// Returns its fields, in the order in which they are in memory.
    #[must_use]
    pub fn words(&self) -> [u64; 9] {
        let Self { data, data_length, bytes, table, table_bytes, page, checked, options, stack } = *self;
        [data, data_length, bytes, table, table_bytes, page, checked, options, stack]
    }
}

const _: () = assert!(size_of::<Loading>() == 9 * 8);

/// The error where the image's data cannot be made, and its code is attached alone: `ENOEXEC`, which its beginning returns for nothing else.
pub const NOT_LOADED: i32 = 8;

/// `SA_SIGINFO`.
pub const SA_SIGINFO: u64 = 4;
/// `SA_RESTORER`.
pub const SA_RESTORER: u64 = 0x0400_0000;
/// `SA_RESTART`.
pub const SA_RESTART: u64 = 0x1000_0000;
/// `SA_ONSTACK`.
pub const SA_ONSTACK: u64 = 0x0800_0000;
/// `SA_NODEFER`.
pub const SA_NODEFER: u64 = 0x4000_0000;
/// `SA_RESETHAND`.
pub const SA_RESETHAND: u64 = 0x8000_0000;
/// The flags of the executive's handler: it runs with the program's own mask, and so often as it must. It may interrupt calls only
/// where a handler of the program's does: see `signals::sigaction`.
pub const ACTION_FLAGS: u64 = SA_SIGINFO | SA_RESTORER | SA_NODEFER | SA_RESTART;
