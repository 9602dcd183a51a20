//! `recvfrom` and `recvmsg` of datagrams that look for one for a while before they block.
//!
//! ```text
//!  SCHED_RR:                SCHED_FIFO:
//!  sched_yield --> receive without blocking --> a datagram: its result
//!       ^                    |
//!       `--------------------+--> none, for less than the limit
//!                            |
//!                            `--> none, for longer: the kernel blocks
//! ```
//!
//! To wake a thread on another CPU takes an interrupt, and on a virtual machine leaving it: more than ten microseconds, which differ from
//! packet to packet. A thread that looks by itself has its packet sooner, and each after the same time. `sched_yield(2)` gives the CPU
//! to the threads of the same real-time priority in the meantime. What they receive needs no wake-up either, as long as more comes before the
//! limit. Who goes first among them is said by their policy, as ever: a thread of `SCHED_FIFO` keeps the CPU while there are datagrams,
//! threads of `SCHED_RR` take turns, here by one datagram each.
//!
//! This is for threads of these two policies only: in all others, `sched_yield` gives up the rest of a time slice. And for datagrams
//! only. What a socket is takes as long to find out as to receive, and is asked when there was nothing to receive twice. A stream that has something
//! answers as if the call blocked, but for `MSG_WAITALL`, which is left to the kernel, and for `SO_RCVLOWAT`: once the program has
//! set that, each socket is looked at first.
//!
//! What the kernel promises holds: a call that does not block returns at once, and a signal whose handler runs ends the call with
//! `EINTR`, or does not, by `SA_RESTART` and `SO_RCVTIMEO` (signal(7)). The time limit of `SO_RCVTIMEO` begins when the kernel blocks.

use core::sync::atomic::AtomicBool;
use core::sync::atomic::Ordering::Relaxed;

use crate::config::SA_RESTART;
use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::syscall::{EAGAIN, EINTR, SET_BYTES, address_mut, call, failed};
use crate::executive::services::call::{Next, ServiceCall, Stage, unusable};
use crate::executive::services::scheduling::RealtimePolicy;
use crate::executive::services::sleeps::{MONOTONIC, now};
use crate::executive::signals::handlers::Interruption;
use crate::nr;

/// Calls that are answered here.
pub(crate) const CALLS: [u64; 2] = [nr::recvfrom, nr::recvmsg];
/// Calls that are seen here.
pub(crate) const SEEN: [u64; 1] = [nr::setsockopt];

const MSG_OOB: u64 = 0x1;
const MSG_DONTWAIT: u64 = 0x40;
const MSG_WAITALL: u64 = 0x100;
const MSG_ERRQUEUE: u64 = 0x2000;
/// With one of these, a call does not wait for a datagram, or for more than one.
const IS_THE_KERNELS: u64 = MSG_OOB | MSG_DONTWAIT | MSG_WAITALL | MSG_ERRQUEUE;

const SOL_SOCKET: u64 = 1;
const SO_TYPE: u64 = 3;
const SO_RCVLOWAT: u64 = 18;
const SO_RCVTIMEO: u64 = 20;
const SOCK_DGRAM: u64 = 2;
const F_GETFL: u64 = 3;
const O_NONBLOCK: i64 = 0o4000;

/// How many looks there are between two readings of the clock.
const LOOKS: u32 = 4;

/// Whether the program has set `SO_RCVLOWAT` of some socket.
static LOW_WATER_SET: AtomicBool = AtomicBool::new(false);

/// Sees one of [`SEEN`].
pub(crate) fn see(call: &mut ServiceCall<'_>, stage: Stage) -> Next {
    if let Stage::Performed(result) = stage {
        return Next::Return(result);
    }
    // The kernel reads `int`s.
    let [_, level, name, ..] = call.arguments.map(|argument| argument & 0xffff_ffff);
    if (level, name) == (SOL_SOCKET, SO_RCVLOWAT) {
        LOW_WATER_SET.store(true, Relaxed);
    }
    Next::Perform
}

/// Answers one of [`CALLS`].
pub(crate) fn step(call: &mut ServiceCall<'_>, stage: Stage) -> Next {
    if let Stage::Performed(result) = stage {
        return Next::Return(result);
    }
    let flags = if call.number == nr::recvfrom { 3 } else { 2 };
    let [socket, ..] = call.arguments;
    let is_the_kernels = call.arguments.get(flags).is_none_or(|flags| flags & IS_THE_KERNELS != 0);
    if is_the_kernels || unusable() || LOW_WATER_SET.load(Relaxed) && !has_datagrams(socket) {
        return Next::Perform;
    }
    RealtimePolicy::current().map_or(Next::Perform, |policy| poll(call, flags, policy))
}

/// Looks for a datagram until there is one, or the limit has passed.
fn poll(asked: &ServiceCall<'_>, flags: usize, policy: RealtimePolicy) -> Next {
    let mut arguments = asked.arguments;
    if let Some(flags) = arguments.get_mut(flags) {
        *flags |= MSG_DONTWAIT;
    }
    let [socket, ..] = arguments;
    let interruption = Interruption::watch();
    let mut start = None;
    for look in 0_u32.. {
        if policy == RealtimePolicy::RoundRobin || look > 0 {
            // SAFETY: the call takes no pointer.
            unsafe { call(nr::sched_yield, [0; 6]) };
        }
        // SAFETY: what the program asked for, but for the flag that it is not to wait.
        let result = unsafe { call(asked.number, arguments) };
        if result != -EAGAIN {
            return Next::Return(result);
        }
        // At the second look, others may have had a turn, as in a call that blocks.
        match look {
            0 if !blocks(socket) => return Next::Return(result),
            0 => continue,
            1 if !has_datagrams(socket) => return Next::Perform,
            _ => {}
        }
        if interruption.signal().is_some_and(|signal| ends_call(signal, socket)) {
            return Next::Return(-EINTR);
        }
        if look % LOOKS == 1 {
            let Some(time) = now(MONOTONIC) else { break };
            let limit = ORRERY_CONFIG.poll_receive.load(Relaxed).cast_signed();
            if time - *start.get_or_insert(time) >= limit {
                break;
            }
        }
    }
    Next::Perform
}

fn has_datagrams(socket: u64) -> bool {
    option(socket, SO_TYPE) == Some(SOCK_DGRAM)
}

fn blocks(socket: u64) -> bool {
    // SAFETY: the call takes no pointer.
    let status = unsafe { call(nr::fcntl, [socket, F_GETFL, 0, 0, 0, 0]) };
    failed(status) || status & O_NONBLOCK == 0
}

/// Returns an option of a socket, the first word of it.
fn option(socket: u64, name: u64) -> Option<u64> {
    let (mut value, mut length) = ([0_u64; 2], size_of::<[u64; 2]>() as u32);
    let arguments = [socket, SOL_SOCKET, name, address_mut(&mut value), address_mut(&mut length), 0];
    // SAFETY: the kernel writes as many bytes as the length says, and the length.
    let result = unsafe { call(nr::getsockopt, arguments) };
    // An `int` fills the lower half of the first word; a `struct timeval` both words.
    (!failed(result)).then_some(if length == 4 { value[0] } else { value[0] | value[1] })
}

/// Returns whether a receive call that waits ends when the handler of this signal returns.
fn ends_call(signal: u64, socket: u64) -> bool {
    let mut action = [0_u64; 4];
    // SAFETY: the kernel writes its `struct sigaction`, which has four words.
    let result = unsafe { call(nr::rt_sigaction, [signal, 0, address_mut(&mut action), SET_BYTES, 0, 0]) };
    let [_, flags, ..] = action;
    failed(result) || flags & SA_RESTART == 0 || option(socket, SO_RCVTIMEO).is_some_and(|time| time != 0)
}
