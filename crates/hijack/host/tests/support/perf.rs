//! Events from the kernel, through a ring in shared memory: perf_event_open(2).

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) const PAGE: usize = 4096;
/// Room for what happens in a few milliseconds, and more: a power of two.
const ROOM: usize = 4096 * PAGE;
/// Where the first page says how far the kernel has written, and we have read.
const HEAD: usize = 1024;
const TAIL: usize = 1032;
const HEADER: usize = 8;

/// `struct perf_event_attr`, as far as it is known since Linux 5.12.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    period: u64,
    sample: u64,
    read: u64,
    flags: u64,
    wake: u32,
    breakpoint: u32,
    configs: [u64; 2],
    branch: u64,
    registers: u64,
    stack: u32,
    clock: i32,
    interrupt_registers: u64,
    auxiliary: u32,
    most_stack: u16,
    reserved: u16,
    auxiliary_sample: u32,
    reserved_too: u32,
    signal: u64,
}

impl Attributes {
    pub(crate) const LOST: u32 = 2;
    pub(crate) const COMM: u32 = 3;
    pub(crate) const FORK: u32 = 7;
    pub(crate) const SAMPLE: u32 = 9;
    /// A name that was given by `execve`.
    pub(crate) const BY_EXEC: u16 = 1 << 13;

    /// All system calls from the next `execve` on, and what children make: thread, time, arguments, instruction.
    pub(crate) fn of_calls(tracepoint: u64) -> Self {
        const KIND_TRACEPOINT: u32 = 2;
        const TID: u64 = 1 << 1;
        const TIME: u64 = 1 << 2;
        const RAW: u64 = 1 << 10;
        const USER_REGISTERS: u64 = 1 << 12;
        const INSTRUCTION: u64 = 1 << 8;
        const DISABLED: u64 = 1;
        const INHERIT: u64 = 1 << 1;
        const NAMES: u64 = 1 << 9;
        const ENABLE_ON_EXEC: u64 = 1 << 12;
        const TASKS: u64 = 1 << 13;
        const IDS_OF_ALL: u64 = 1 << 18;
        const NAMES_BY_EXEC: u64 = 1 << 24;
        const CLOCK: u64 = 1 << 25;
        Self {
            kind: KIND_TRACEPOINT,
            size: u32::try_from(size_of::<Self>()).unwrap_or(0),
            config: tracepoint,
            period: 1,
            sample: TID | TIME | RAW | USER_REGISTERS,
            flags: DISABLED | INHERIT | NAMES | ENABLE_ON_EXEC | TASKS | IDS_OF_ALL | NAMES_BY_EXEC | CLOCK,
            registers: INSTRUCTION,
            clock: libc::CLOCK_MONOTONIC,
            ..Self::default()
        }
    }
}

/// The ring of one CPU.
pub(crate) struct Ring {
    start: *mut u8,
    _descriptor: OwnedFd,
}

// SAFETY: whoever has it reads what the kernel wrote; there is one reader.
unsafe impl Send for Ring {}
// SAFETY: the same.
unsafe impl Sync for Ring {}

impl Ring {
    /// # Errors
    /// Where there is no memory for it.
    pub(crate) fn map(descriptor: OwnedFd) -> Result<Self, String> {
        // SAFETY: new memory.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE + ROOM,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                descriptor.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(format!("map a ring of perf: {}", std::io::Error::last_os_error()));
        }
        Ok(Self { start: start.cast(), _descriptor: descriptor })
    }

    /// Takes what is there: kind, flags and body of each record.
    pub(crate) fn drain(&self, mut take: impl FnMut(u32, u16, &[u8])) {
        // SAFETY: the kernel writes `head`, and we `tail`; both are in the first page. What is between them in the ring
        // stays as it is.
        unsafe {
            #[expect(clippy::cast_ptr_alignment, reason = "places in a page, at multiples of eight")]
            let (head, tail) =
                (&*self.start.add(HEAD).cast::<AtomicU64>(), &*self.start.add(TAIL).cast::<AtomicU64>());
            let end = usize::try_from(head.load(Ordering::Acquire)).unwrap_or(0);
            let mut at = usize::try_from(tail.load(Ordering::Relaxed)).unwrap_or(0);
            let mut body = Vec::new();
            let byte = |at: usize| self.start.add(PAGE + at % ROOM).read();
            while at < end {
                let header: [u8; HEADER] = std::array::from_fn(|index| byte(at + index));
                let [a, b, c, d, e, f, g, h] = header;
                let length = usize::from(u16::from_ne_bytes([g, h])).max(HEADER);
                body.clear();
                body.extend((at + HEADER..at + length).map(byte));
                take(u32::from_ne_bytes([a, b, c, d]), u16::from_ne_bytes([e, f]), &body);
                at += length;
            }
            tail.store(end as u64, Ordering::Release);
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: our mapping.
        unsafe { libc::munmap(self.start.cast(), PAGE + ROOM) };
    }
}
