//! TCP connections: the two queues of bytes that the program has not read, and that the other side has not
//! acknowledged.
//!
//! Received packets hang in a list, sent ones in a tree until they are acknowledged, unsent ones in a list again. Each
//! says which sequence numbers it carries; put together they must cover the queue without a gap, or the connection is
//! not one that can be continued.
//!
//! A kernel dies between any two instructions, and its notes of one thing in several places then differ. What is
//! returned here is right after each of them, for these reasons:
//!
//! - A packet counts bytes before it has them (`tcp_sendmsg_locked`), has them before its numbers tell of them, and
//!   loses its first ones before its numbers do (`tcp_trim_head`). So what it carries is counted from what it has
//!   ([`crate::packet`]), from its first number on, or up to its last where it has less than its numbers tell of.
//! - A packet goes from the list of unsent ones into the tree of sent ones through nothing (`tcp_event_new_data_sent`),
//!   and the tree may be about to turn. But all that was sent hangs in order of time, too (`tsorted_sent_queue`), from
//!   before that until it is acknowledged.
//! - A packet that is too long for what may be sent is cut in two, of which the second is linked nowhere until both are
//!   whole (`tso_fragment`): until then its bytes are found in the first one's pages.
//! - Received bytes count before they are in their list (`tcp_queue_rcv`). What follows a gap has not been acknowledged
//!   as long as it is behind what the last packet to the other side said (`rcv_wup`): it comes again, if it is not
//!   counted.

use crate::error::{Error, Result};
use crate::file::OpenFile;
use crate::list;
use crate::object::Object;
use crate::packet::{LONGEST, beginning, carried, cut_off, packets, parts, remaining};
use crate::rbtree;

/// No queue is longer than the largest window.
const LONGEST_QUEUE: u32 = 1 << 30;
/// `TCPHDR_FIN` and `TCPHDR_SYN`, which take a number each.
const FIN: u32 = 1;
const SYN: u32 = 2;

/// What a TCP connection needs to go on elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of RFC 9293 and of the kernel's tcp_sock")]
pub struct TcpConnection {
    /// Bytes that the program has not read.
    pub received: Vec<u8>,
    /// Bytes that the other side has not acknowledged, sent or not.
    pub unacknowledged: Vec<u8>,
    /// How many of these cannot have been sent.
    pub unsent: u32,
    /// How many more bytes a program's call has copied than are counted by `write_seq`, and so are not among these.
    pub uncounted: u32,
    pub rcv_nxt: u32,
    pub write_seq: u32,
    pub mss_clamp: u32,
    pub has_timestamps: bool,
    pub has_sack: bool,
    pub has_window_scaling: bool,
    pub snd_wscale: u32,
    pub rcv_wscale: u32,
    /// What to add to the clock for a timestamp.
    pub timestamp_offset: u32,
    /// Whether timestamps count microseconds (`RTAX_FEATURE_TCP_USEC_TS` of Linux 6.7), not milliseconds.
    pub has_microseconds: bool,
    pub snd_wl1: u32,
    pub snd_wnd: u32,
    pub max_window: u32,
    pub rcv_wnd: u32,
    pub rcv_wup: u32,
    pub no_delay: bool,
}

/// What a packet carries.
struct Segment {
    /// The number of its first byte.
    sequence: u32,
    bytes: Vec<u8>,
    /// How many of them its numbers tell of.
    claimed: usize,
}

impl OpenFile<'_> {
    /// Returns where the parts of the first packet end of which a program has not read all, counted from what it has
    /// not read. A program that reads is given one after the other, and that it was is noted (`copied_seq`) when it
    /// has been given what it wanted of all.
    ///
    /// # Errors
    ///
    /// Those of reading. The file must be a TCP socket.
    pub fn unread_parts(&self) -> Result<Vec<u32>> {
        let sock = self.sock()?;
        let read = sock.kernel().object("tcp_sock", sock.address())?.u32("copied_seq")?;
        for packet in packets(sock, "sk_receive_queue")? {
            let control = sock.kernel().object("tcp_skb_cb", packet.address_of("cb")?)?;
            let before = read.wrapping_sub(control.u32("seq")?);
            if before < packet.u32("len")? {
                let ends = parts(packet)?.into_iter().scan(0_u32, |end, length| {
                    *end = end.saturating_add(length);
                    Some(*end)
                });
                return Ok(ends.filter_map(|end| end.checked_sub(before)).filter(|&end| end > 0).collect());
            }
        }
        Ok(Vec::new())
    }

    /// The connection, of a TCP socket that is established.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`] where its queues have gaps.
    pub fn tcp_connection(&self) -> Result<TcpConnection> {
        let sock = self.sock()?;
        let tcp = sock.kernel().object("tcp_sock", sock.address())?;
        let (rcv_nxt, copied) = (tcp.u32("rcv_nxt")?, tcp.u32("copied_seq")?);
        let (write_seq, una, nxt) = (tcp.u32("write_seq")?, tcp.u32("snd_una")?, tcp.u32("snd_nxt")?);
        let rcv_wup = tcp.u32("rcv_wup")?;
        let received = Queue::between(sock, copied, rcv_nxt, &packets(sock, "sk_receive_queue")?)?;
        let received = received.up_to_gap(sock, rcv_wup)?;
        let waiting = packets(sock, "sk_write_queue")?;
        let mut sent = sent(sock, tcp)?;
        sent.extend(&waiting);
        let mut unacknowledged = Queue::between(sock, una, write_seq, &sent)?;
        unacknowledged.put_cut_off(&sent)?;
        let unacknowledged = unacknowledged.whole(sock)?;
        let flag = |path| -> Result<bool> { Ok(tcp.u32(path)? != 0) };
        Ok(TcpConnection {
            rcv_nxt: copied.wrapping_add(u32::try_from(received.len()).unwrap_or(0)),
            received,
            unacknowledged,
            unsent: unsent(una, nxt, write_seq, waiting.first().map(|first| numbers(*first)).transpose()?),
            uncounted: waiting.last().map_or(Ok(0), |last| uncounted(*last, write_seq))?,
            write_seq,
            mss_clamp: tcp.u32("rx_opt.mss_clamp")?,
            has_timestamps: flag("rx_opt.tstamp_ok")?,
            has_sack: flag("rx_opt.sack_ok")?,
            has_window_scaling: flag("rx_opt.wscale_ok")?,
            snd_wscale: tcp.u32("rx_opt.snd_wscale")?,
            rcv_wscale: tcp.u32("rx_opt.rcv_wscale")?,
            timestamp_offset: tcp.u32("tsoffset")?,
            has_microseconds: tcp.has("tcp_usec_ts") && flag("tcp_usec_ts")?,
            snd_wl1: tcp.u32("snd_wl1")?,
            snd_wnd: tcp.u32("snd_wnd")?,
            max_window: tcp.u32("max_window")?,
            rcv_wnd: tcp.u32("rcv_wnd")?,
            rcv_wup,
            // TCP_NAGLE_OFF.
            no_delay: tcp.u32("nonagle")? & 1 != 0,
        })
    }
}

/// The packets that were sent and are not acknowledged, each at least once, in no order.
fn sent<'k>(sock: Object<'k>, tcp: Object<'k>) -> Result<Vec<Object<'k>>> {
    let root = sock.kernel().read_u64(sock.address_of("tcp_rtx_queue")?)?;
    let by_number = rbtree::members(sock.kernel(), root, "sk_buff", "rbnode");
    if !tcp.has("tsorted_sent_queue") {
        return by_number;
    }
    // Whether anything is missing shows in the numbers.
    let by_time = tcp.embedded("tsorted_sent_queue", "list_head")?;
    let mut all = list::members(by_time, "sk_buff", "tcp_tsorted_anchor").found;
    all.extend(by_number.unwrap_or_default());
    Ok(all)
}

/// Returns the numbers of a packet's bytes, by its own notes: the first, and how many.
fn numbers(packet: Object<'_>) -> Result<(u32, u32)> {
    let control = packet.kernel().object("tcp_skb_cb", packet.address_of("cb")?)?;
    let (start, end, flags) = (control.u32("seq")?, control.u32("end_seq")?, control.u32("tcp_flags")?);
    let one = |flag| u32::from(flags & flag != 0);
    let length = end.wrapping_sub(start).wrapping_sub(one(SYN)).wrapping_sub(one(FIN)).cast_signed();
    Ok((start.wrapping_add(one(SYN)), length.max(0).cast_unsigned()))
}

/// Reads a packet of a queue that begins with `start`.
fn segment(packet: Object<'_>, start: u32) -> Result<Segment> {
    let ((first, claimed), mut bytes) = (numbers(packet)?, carried(packet)?);
    if claimed > LONGEST_QUEUE {
        return Err(packet.corrupt(format!("it claims {claimed} bytes")));
    }
    // Its first bytes are acknowledged, and being dropped.
    let is_trimmed = (1..claimed).contains(&start.wrapping_sub(first));
    let claimed = claimed as usize;
    if is_trimmed && bytes.len() != claimed {
        bytes = remaining(packet)?;
    } else if bytes.len() < claimed {
        bytes = beginning(packet, u32::try_from(claimed).unwrap_or(u32::MAX))?;
    }
    let lost = u32::try_from(claimed.saturating_sub(bytes.len())).unwrap_or(0);
    Ok(Segment { sequence: first.wrapping_add(lost), claimed: claimed.min(bytes.len()), bytes })
}

/// Returns how many bytes the packet that is being filled has been given that are not counted as the connection's.
fn uncounted(packet: Object<'_>, write_seq: u32) -> Result<u32> {
    let ahead = numbers(packet)?.0.wrapping_add(packet.u32("len")?).wrapping_sub(write_seq);
    Ok(if ahead < LONGEST_QUEUE { ahead } else { 0 })
}

/// Returns how many bytes before `end` cannot have been sent. The first packet that waits may be on its way already:
/// that it was sent is noted (`snd_nxt`) when it has been, and by then the other side may have it, and have
/// acknowledged it. To a connection that goes on elsewhere and does not know that it had sent it this acknowledgment
/// would be nonsense, each time that it comes.
fn unsent(first: u32, next: u32, end: u32, waiting: Option<(u32, u32)>) -> u32 {
    let begun = waiting.map_or(next, |(sequence, length)| sequence.wrapping_add(length));
    let (all, sent) = (end.wrapping_sub(first), next.wrapping_sub(first));
    all.saturating_sub(sent.max(begun.wrapping_sub(first).min(all)))
}

/// The bytes from one sequence number on, as far as packets have them.
struct Queue {
    first: u32,
    bytes: Vec<u8>,
    /// Of each byte, whether a packet has it.
    covered: Vec<bool>,
    /// The numbers of packets that could not be read, as far as these could, and why the first could not.
    unread: Vec<Option<(u32, u32)>>,
    problem: Option<Error>,
}

impl Queue {
    fn between(sock: Object<'_>, first: u32, end: u32, packets: &[Object<'_>]) -> Result<Self> {
        let length = end.wrapping_sub(first);
        if length > LONGEST_QUEUE {
            return Err(sock.corrupt(format!("a queue from {first:#x} to {end:#x}")));
        }
        let (mut segments, mut unread, mut problem, mut held) = (Vec::new(), Vec::new(), None, 0);
        for &packet in packets {
            match segment(packet, first) {
                Ok(segment) => {
                    held += segment.bytes.len();
                    segments.push(segment);
                }
                Err(other) => {
                    unread.push(numbers(packet).ok());
                    problem = problem.or(Some(other));
                }
            }
            // What was sent is there twice at most.
            if held > 2 * LONGEST_QUEUE as usize {
                return Err(sock.corrupt(format!("its packets have {held} bytes and more")));
            }
        }
        // A number may say anything: what is behind all that there is, a packet being cut among it, is a gap whatever its length.
        let length = (length as usize).min(held + LONGEST);
        let mut queue = Self { first, bytes: vec![0; length], covered: vec![false; length], unread, problem };
        let mut unclaimed = Vec::new();
        for Segment { sequence, mut bytes, claimed } in segments {
            let more = bytes.split_off(claimed);
            unclaimed.push((sequence.wrapping_add(u32::try_from(claimed).unwrap_or(0)), more));
            queue.put(sequence, &bytes);
        }
        // What packets have beyond their own numbers counts where no other packet tells of it.
        for (sequence, bytes) in unclaimed {
            queue.put(sequence, &bytes);
        }
        Ok(queue)
    }

    /// Enters what a packet had that is being cut in two.
    fn put_cut_off(&mut self, packets: &[Object<'_>]) -> Result<()> {
        let Some(gap) = self.gap() else { return Ok(()) };
        let length = self.covered[gap..].iter().take_while(|covered| !**covered).count();
        let (gap, length) = (u32::try_from(gap).unwrap_or(0), u32::try_from(length).unwrap_or(0));
        let sequence = self.first.wrapping_add(gap);
        let has = |numbers: Option<(u32, u32)>| {
            numbers.is_none_or(|(first, length)| sequence.wrapping_sub(first) < length)
        };
        if self.unread.iter().any(|numbers| has(*numbers)) {
            return Ok(());
        }
        for &packet in packets {
            let (first, claimed) = numbers(packet)?;
            if claimed > 0 && first.wrapping_add(claimed) == sequence {
                let bytes = cut_off(packet, claimed, length)?;
                self.put(sequence, &bytes);
            }
        }
        Ok(())
    }

    /// Enters bytes from a sequence number on, where there are none yet.
    fn put(&mut self, sequence: u32, bytes: &[u8]) {
        let offset = i64::from(sequence.wrapping_sub(self.first).cast_signed());
        let skipped = usize::try_from(-offset).unwrap_or(0).min(bytes.len());
        let at = usize::try_from(offset).unwrap_or(0);
        let places = self.bytes.iter_mut().zip(&mut self.covered).skip(at);
        for ((into, covered), &byte) in places.zip(&bytes[skipped..]).filter(|((_, covered), _)| !**covered) {
            (*into, *covered) = (byte, true);
        }
    }

    fn gap(&self) -> Option<usize> {
        self.covered.iter().position(|covered| !covered)
    }

    /// Returns all bytes of the queue.
    fn whole(self, sock: Object<'_>) -> Result<Vec<u8>> {
        let Some(gap) = self.gap() else { return Ok(self.bytes) };
        let (first, length) = (self.first, self.bytes.len());
        let why = format!("of {length} bytes or more from {first:#x} on it lacks those after {gap}");
        Err(self.problem.unwrap_or_else(|| sock.corrupt(why)))
    }

    /// All before the first gap, where what follows was not acknowledged: only numbers before this one had been sent to
    /// the other side.
    fn up_to_gap(mut self, sock: Object<'_>, acknowledged: u32) -> Result<Vec<u8>> {
        // Negative where nothing of it was.
        let acknowledged = acknowledged.wrapping_sub(self.first).cast_signed();
        match self.gap() {
            Some(gap) if usize::try_from(acknowledged).unwrap_or(0) <= gap => {
                self.bytes.truncate(gap);
                Ok(self.bytes)
            }
            _ => self.whole(sock),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_that_may_be_on_its_way_counts_as_sent() {
        // Numbers go round; ten bytes are outstanding, of thirty.
        let first = u32::MAX - 4;
        let at = |place: u32| first.wrapping_add(place);
        assert_eq!(unsent(first, at(10), at(30), Some((at(10), 5))), 15);
        assert_eq!(unsent(first, at(10), at(30), Some((at(10), 20))), 0);
        // Noted already, and still in the list.
        assert_eq!(unsent(first, at(10), at(30), Some((at(5), 5))), 20);
        assert_eq!(unsent(first, at(30), at(30), None), 0);
        assert_eq!(unsent(first, first, first, None), 0);
        // What contradicts itself is no more than there is.
        assert_eq!(unsent(first, at(40), at(30), Some((at(90), 5))), 0);
    }

    #[test]
    fn bytes_are_put_where_their_numbers_say_around_the_end_and_not_twice() {
        let first = u32::MAX - 1;
        let mut queue =
            Queue { first, bytes: vec![0; 6], covered: vec![false; 6], unread: Vec::new(), problem: None };
        queue.put(first.wrapping_sub(2), b"xxa");
        queue.put(first.wrapping_add(2), b"cde");
        assert_eq!(queue.gap(), Some(1));
        queue.put(first, b"zbzzzfgh");
        queue.put(first.wrapping_sub(9), b"gone");
        queue.put(first.wrapping_add(90), b"far");
        assert_eq!((queue.gap(), &*queue.bytes), (None, &b"abcdef"[..]));
    }
}
