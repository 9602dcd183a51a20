//! How many bytes a call had moved when its kernel died: from where its thread is in the kernel, and from how far the
//! kernel's iterator over its buffers had come.
//!
//! A thread is in a chain of calls. The outer ones look the descriptor up; an inner one makes the iterator and calls
//! what moves the bytes, which moves it on. So before that there is nothing, from then on the iterator tells, and when
//! the inner ones have returned it is below the stack, as they left it: nothing has run there since. One that is
//! about to return, its frame given up, has the number in the register for results.
//!
//! An append is different: bytes are in the file when the file has become longer, and whether the iterator is ahead of
//! that shows in who has the file locked.

use anyhow::{Context as _, Result, ensure};
use orrery_kimage::{
    Called, FileKind, Frame, InetSocket, Kernel, OpenFile, Registers, Returning, Standing, Task, UserBuffer,
};

use super::io_calls::{self, IoCall};

/// The functions that have the iterator, or a copy of it that moves on.
const INNER: &[&str] = &[
    "vfs_read",
    "vfs_write",
    "new_sync_read",
    "new_sync_write",
    "vfs_readv",
    "vfs_writev",
    "do_iter_read",
    "do_iter_write",
    "do_iter_readv_writev",
    "__sys_recvfrom",
    "__sys_sendto",
    "__sys_recvmsg",
    "___sys_recvmsg",
    "____sys_recvmsg",
    "__sys_sendmsg",
    "___sys_sendmsg",
    "____sys_sendmsg",
    "sock_read_iter",
    "sock_write_iter",
];
/// Those that call them.
const OUTER: &[&str] = &[
    "ksys_read",
    "ksys_write",
    "do_readv",
    "do_writev",
    "__x64_sys_read",
    "__x64_sys_write",
    "__x64_sys_readv",
    "__x64_sys_writev",
    "__x64_sys_recvfrom",
    "__x64_sys_sendto",
    "__x64_sys_recvmsg",
    "__x64_sys_sendmsg",
    "x64_sys_call",
    "do_syscall_64",
];
/// What the inner ones call before they move anything.
const BEFORE: &[&str] = &[
    "rw_verify_area",
    "security_file_permission",
    "__cond_resched",
    "__percpu_down_read",
    "__get_task_ioprio",
    "import_single_range",
    "import_iovec",
    "sockfd_lookup_light",
    "copy_msghdr_from_user",
];
/// What the outer ones call when the inner ones have returned.
const AFTER: &[&str] = &["fput", "__f_unlock_pos", "mutex_unlock", "kfree"];
/// What copies a packet to a program, part by part.
const COPIES: &[&str] = &["skb_copy_datagram_iter", "__skb_datagram_iter"];
/// What copies from a program for what is sent, piece by piece, and who counts the pieces.
const COPIES_IN: &[&str] = &["_copy_from_iter", "_copy_from_iter_nocache", "_copy_from_iter_full"];
const SENDS: &[&str] = &["tcp_sendmsg_locked"];
/// Who counts what [`COPIES`] has copied of a connection's.
const RECEIVES: &[&str] = &["tcp_recvmsg_locked"];
/// No piece that is sent is longer (`SKB_FRAG_PAGE_ORDER`).
const LONGEST_PIECE: u64 = 32 << 10;
/// How many bytes are compared with what was sent.
const COMPARED: usize = 64;
/// How far below the stack the inner ones' frames reach.
const BELOW: u64 = 1024;
/// `IPPROTO_TCP`, and `TCP_ESTABLISHED` of `net/tcp_states.h`.
const TCP: u32 = 6;
const ESTABLISHED: u32 = 1;
/// The lowest bits of a lock's owner are marks.
const OWNER: u64 = 7;

/// What is known of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It has not begun to move bytes.
    Before,
    /// The iterator tells, between these addresses of the stack; if it is not there yet, nothing has moved.
    Beginning(u64, u64),
    /// The iterator tells.
    Within(u64, u64),
    /// The same; and what there is to be noted of the file has been noted.
    After(u64, u64),
    /// The inner ones return with so many, or an error; what they had on the stack is between these addresses.
    Returns(u64, u64, u64),
    /// So do the outer ones.
    Over(u64),
}

/// Returns how many bytes the call had moved that a thread is in; nothing of a call that moves none, or where that
/// does not matter, as it may be done again in every case.
///
/// # Errors
///
/// Where that is unknown.
pub(super) fn moved(
    thread: &Task<'_>,
    registers: &Registers,
    standing: Option<Standing>,
) -> Result<Option<u64>> {
    let Some(call) = io_calls::find(registers.orig_ax.cast_signed()) else { return Ok(None) };
    let descriptors = thread.descriptors().found;
    let descriptor = descriptors.iter().find(|one| u64::from(one.number) == registers.di & 0xffff_ffff);
    let Some(file) = descriptor.map(|descriptor| descriptor.file) else { return Ok(None) };
    let moved = moved_by(thread, registers, standing, call, &file);
    moved.map(Some).with_context(|| format!("how much its {} had moved cannot be told", call.name()))
}

fn moved_by(
    thread: &Task<'_>,
    registers: &Registers,
    standing: Option<Standing>,
    call: &IoCall,
    file: &OpenFile<'_>,
) -> Result<u64> {
    let kernel = thread.object().kernel();
    let buffers = call.buffers(thread, registers).context("its buffers cannot be read")?;
    let frames = thread.kernel_stack(standing).context("its way through the kernel is lost")?;
    let phase = phase(kernel, &frames).context("it is at no known place in the kernel")?;
    let progress = |from, to| kernel.progress(from, to, &buffers, call.writes).map(|found| found.moved);
    let not_there = "how far it had come is not there";
    let (from, to, done) = match phase {
        Phase::Before => return Ok(0),
        Phase::After(from, to) => return progress(from, to).context(not_there),
        Phase::Over(result) => return Ok(without_error(result)),
        Phase::Returns(from, to, result) => (from, to, without_error(result)),
        Phase::Beginning(from, to) => (from, to, progress(from, to).unwrap_or(0)),
        Phase::Within(from, to) => (from, to, progress(from, to).context(not_there)?),
    };
    if done == 0 {
        return Ok(0);
    }
    if file.kind()? != FileKind::Regular {
        let unnoted = match (is_connection(file)?, call.writes) {
            (false, _) => 0,
            (true, true) => taken_unnoted(thread, file, &buffers, done, taking(kernel, &frames)?)?,
            (true, false) if is_giving(kernel, &frames) => given_unnoted(thread, file, &buffers, done)?,
            (true, false) => 0,
        };
        return Ok(done.saturating_sub(unnoted));
    }
    if !call.writes || file.flags()? & libc::O_APPEND.cast_unsigned() == 0 {
        // The file's position moves when all is done: the same bytes once more, from or to the same place.
        return Ok(0);
    }
    let place = kernel.place_in_file(from, to, file.object().address());
    appended(thread, file, done, place.context("its place in the file is not there")?)
}

/// Returns what a call returns that has moved so many bytes; nothing with an error.
fn without_error(result: u64) -> u64 {
    if result.cast_signed() < 0 { 0 } else { result }
}

/// Returns whether a frame of one of the functions that count what others copy was interrupted after one of those had
/// returned to it.
fn has_copied(kernel: &Kernel, frame: &Frame, counts: &[&str], copies: &[&str]) -> bool {
    let called_last = || match kernel.called_last(frame) {
        Some(Called::Function(start)) => is_one(kernel, start, copies),
        _ => false,
    };
    frame.interrupted && is_in(kernel, frame, counts) && called_last()
}

/// Returns whether a call copies what was received, or has just done so and may not have counted it.
fn is_giving(kernel: &Kernel, frames: &[Frame]) -> bool {
    let is_so = |frame| is_in(kernel, frame, COPIES) || has_copied(kernel, frame, RECEIVES, COPIES);
    frames.iter().any(is_so)
}

/// Whether a call takes bytes from a program to send them, and its connection may not count what was taken last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taking {
    /// It is being copied, and the iterator tells of it or does not.
    Perhaps,
    /// It is copied, and nobody counts it.
    Surely,
    /// The packet counts it, or all do; or nothing is being taken.
    Counting,
}

fn taking(kernel: &Kernel, frames: &[Frame]) -> Result<Taking> {
    let sends = frames.iter().position(|frame| is_in(kernel, frame, SENDS));
    let Some(sends) = sends else { return Ok(Taking::Counting) };
    if let Some(copies) = frames[..sends].iter().find(|frame| is_in(kernel, frame, COPIES_IN)) {
        let is_done = kernel.returning(copies).is_some();
        return Ok(if is_done { Taking::Surely } else { Taking::Perhaps });
    }
    let frame = &frames[sends];
    let length = kernel.types().field("sk_buff", "len")?.offset;
    let is_so = has_copied(kernel, frame, SENDS, COPIES_IN) && kernel.has_not_added(frame, length);
    Ok(if is_so { Taking::Surely } else { Taking::Counting })
}

fn is_connection(file: &OpenFile<'_>) -> Result<bool> {
    let is_so = |socket: &InetSocket| (socket.protocol, socket.state) == (TCP, ESTABLISHED);
    Ok(file.inet_socket()?.as_ref().is_some_and(is_so))
}

/// Returns the last of the first `done` bytes of a call's buffers, at most so many.
fn last_bytes(thread: &Task<'_>, buffers: &[UserBuffer], done: u64, most: u64) -> Result<Vec<u8>> {
    let space = thread.address_space()?.context("it has no memory")?;
    let (mut bytes, mut left) = (Vec::new(), done);
    for buffer in buffers {
        let length = buffer.length.min(left);
        let skipped = left.saturating_sub(most).min(length);
        let start = bytes.len();
        bytes.resize(start + usize::try_from(length - skipped)?, 0);
        space.read(buffer.address.wrapping_add(skipped), &mut bytes[start..])?;
        left -= length;
    }
    Ok(bytes)
}

/// Returns how many of the `done` bytes that a program has been given its TCP connection does not know that it has
/// given: they come again, and do not count.
fn given_unnoted(thread: &Task<'_>, file: &OpenFile<'_>, buffers: &[UserBuffer], done: u64) -> Result<u64> {
    let given = last_bytes(thread, buffers, done, done)?;
    let ends: Vec<usize> = file.unread_parts()?.into_iter().map(|end| end as usize).collect();
    Ok(repeated(&given, &file.tcp_connection()?.received, &ends) as u64)
}

/// Returns how many of the `done` bytes that were taken from a program its TCP connection does not count yet: they
/// are not in its queue.
fn taken_unnoted(
    thread: &Task<'_>,
    file: &OpenFile<'_>,
    buffers: &[UserBuffer],
    done: u64,
    taking: Taking,
) -> Result<u64> {
    let tcp = file.tcp_connection()?;
    if tcp.uncounted > 0 || taking == Taking::Counting {
        return Ok(u64::from(tcp.uncounted));
    }
    let taken = last_bytes(thread, buffers, done, LONGEST_PIECE + COMPARED as u64)?;
    let most = taken.len() - usize::from(taking == Taking::Surely);
    let uncounted = (taken.len() - counted(&taken, &tcp.unacknowledged, most)) as u64;
    ensure!(uncounted <= LONGEST_PIECE, "what was sent is not what it gave");
    Ok(uncounted)
}

/// Returns how many of the bytes that were taken are in a queue, if they are at most so many: its end is one of
/// theirs. So many bytes are compared that no end is one by chance; pieces are longer than that.
fn counted(taken: &[u8], queue: &[u8], most: usize) -> usize {
    let Some(end) = queue.len().checked_sub(COMPARED).map(|from| &queue[from..]) else { return 0 };
    let is_end = |&count: &usize| taken[..count].ends_with(end);
    (COMPARED..=most).rev().find(is_end).unwrap_or(0)
}

/// With how many bytes that end what was given, the most if it may be several numbers, what is to come begins: as many
/// as one of the first packet's parts ends with, or as were given in all, or as what a call wanted had left of a part,
/// if they are so many that it is not by chance. They are all of that packet, as the ones before are noted.
fn repeated(given: &[u8], coming: &[u8], ends: &[usize]) -> usize {
    let most = ends.last().map_or(0, |&end| end.min(given.len()).min(coming.len()));
    let may_be = |count: &usize| *count == given.len() || *count >= COMPARED || ends.contains(count);
    let is_so = |&count: &usize| given[given.len() - count..] == coming[..count];
    (1..=most).rev().filter(may_be).find(is_so).unwrap_or(0)
}

/// Returns how many of `done` bytes that an append has copied are in the file.
fn appended(thread: &Task<'_>, file: &OpenFile<'_>, done: u64, place: u64) -> Result<u64> {
    let inode = file.inode()?;
    let owner = inode.u64("i_rwsem.owner")? & !OWNER;
    // Before it has the lock it has copied nothing; when it has given it back all is in the file.
    if owner != thread.object().address() {
        return Ok(done);
    }
    let size = inode.u64("i_size")?;
    Ok(longer(size, place, done, file.position()?))
}

/// Returns how much longer a file has become by an append of which `done` bytes were copied: the call's place is
/// where it began, until it is moved to where it ended.
fn longer(size: u64, place: u64, done: u64, position: u64) -> u64 {
    if size == place && position.checked_add(done) == Some(place) {
        return done;
    }
    size.saturating_sub(place).min(done)
}

/// Returns whether one of these functions begins there.
fn is_one(kernel: &Kernel, start: u64, names: &[&str]) -> bool {
    names.iter().any(|name| kernel.symbols().is_at(name, start))
}

/// Returns whether a frame is of one of these functions.
fn is_in(kernel: &Kernel, frame: &Frame, names: &[&str]) -> bool {
    let within = frame.instruction.wrapping_sub(u64::from(!frame.interrupted));
    kernel.symbols().function(within).is_some_and(|start| is_one(kernel, start, names))
}

/// Returns where a thread is in its call.
fn phase(kernel: &Kernel, frames: &[Frame]) -> Option<Phase> {
    let is_one = |start, names| is_one(kernel, start, names);
    let is_in = |frame, names| is_in(kernel, frame, names);
    if let Some(outermost) = frames.iter().rposition(|frame| is_in(frame, INNER)) {
        let at = frames.iter().position(|frame| is_in(frame, INNER)).unwrap_or(outermost);
        let (from, to) = (frames[at].start, frames[outermost].end);
        match kernel.returning(&frames[at]) {
            Some(Returning::With(result)) => {
                return Some(Phase::Returns(from.saturating_sub(BELOW), to, result));
            }
            Some(Returning::Somehow) => return Some(Phase::Within(from.saturating_sub(BELOW), to)),
            None => {}
        }
        return Some(match kernel.called_last(&frames[at]) {
            Some(Called::Function(start)) if is_one(start, BEFORE) => Phase::Before,
            None => Phase::Beginning(from, to),
            Some(_) => Phase::Within(from, to),
        });
    }
    let at = frames.iter().position(|frame| is_in(frame, OUTER))?;
    let frame = &frames[at];
    match kernel.returning(frame) {
        Some(Returning::With(result)) => return Some(Phase::Over(result)),
        Some(Returning::Somehow) => {
            return Some(Phase::After(frame.start.saturating_sub(BELOW), frame.start));
        }
        None => {}
    }
    let has_returned = |start| [INNER, OUTER, AFTER].iter().any(|names| is_one(start, names));
    // An interrupt saves its registers where that would be found.
    let is_covered = frame.interrupted && at > 0 && frames[at - 1].end.abs_diff(frame.start) < BELOW;
    match kernel.called_last(frame) {
        Some(Called::Function(start)) if has_returned(start) => {
            Some(Phase::After(frame.start.saturating_sub(BELOW), frame.start))
        }
        None if is_covered => None,
        _ => Some(Phase::Before),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_and_is_still_to_come_does_not_count() {
        let long: Vec<u8> = (0..=255).collect();
        assert_eq!(repeated(&long, &long[100..], &[1000]), 156);
        assert_eq!(repeated(&long, &long[200..], &[1000]), 0, "too few to tell");
        assert_eq!(repeated(&[0; 999], &[0; 999], &[300, 400]), 400, "there is no more in the packet");
        assert_eq!(repeated(&[0; 999], &[], &[]), 0);
        // Of a packet's three parts two were copied, and nothing is noted yet.
        assert_eq!(repeated(b"abcdef", b"abcdefghi", &[3, 6]), 6);
        // An earlier packet was noted, and one part of this one was copied.
        assert_eq!(repeated(b"xyzabc", b"abcdefghi", &[3, 6]), 3);
        // Nothing of it was.
        assert_eq!(repeated(b"uvwxyz", b"abcdefghi", &[3, 6]), 0);
        // What is to come is shorter than what was given, or nothing.
        assert_eq!(repeated(b"abcdef", b"abc", &[6]), 0);
        assert_eq!(repeated(b"", b"", &[3]), 0);
    }

    #[test]
    fn what_was_taken_counts_as_far_as_the_queue_ends_with_it() {
        let long: Vec<u8> = (0..=255).collect();
        assert_eq!(counted(&long, &long, 256), 256);
        assert_eq!(counted(&long, &long, 255), 0, "not all can be");
        assert_eq!(counted(&long, &long[..200], 255), 200);
        assert_eq!(counted(&long, &long[..COMPARED], 255), COMPARED);
        assert_eq!(counted(&long, &long[..COMPARED - 1], 255), 0, "too few to compare");
        assert_eq!(counted(&long, &[7; 100], 255), 0);
        assert_eq!(counted(b"again\n", b"again\n", 5), 0);
    }

    #[test]
    fn an_append_counts_by_what_the_file_has_become() {
        // Copied and not in the file yet, a part of it, all of it.
        assert_eq!([1000, 1040, 1100].map(|size| longer(size, 1000, 100, 1000)), [0, 40, 100]);
        // Its place has been moved to its end, and the descriptor's has not.
        assert_eq!(longer(1100, 1100, 100, 1000), 100);
        assert_eq!(longer(900, 1000, 100, 0), 0, "a file that was cut meanwhile");
    }
}
