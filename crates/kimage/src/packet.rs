//! Packets (`sk_buff`), and the lists that they hang in.
//!
//! What a packet carries is in a linear part, in pages, and in further packets that hang on it. How long each of
//! these is stands by it; how long all are together stands in the packet, too, and a kernel that died in between has
//! noted the one and not the other. So the parts are read by what they say of themselves, and it is the caller's to
//! compare that with what it knows.

use std::collections::HashSet;

use crate::error::Result;
use crate::object::Object;

const MOST_PACKETS: usize = 1 << 16;
/// More than any kernel has (`CONFIG_MAX_SKB_FRAGS`).
const MOST_PAGES: u64 = 64;
const LONGEST_PART: u32 = 1 << 20;
/// What is taken for pages of packets at once, and where memory is short (`SKB_FRAG_PAGE_ORDER`).
const PAGES: [u32; 2] = [32 << 10, 4 << 10];
/// How deep packets hang on packets.
const DEEPEST: u32 = 4;
/// No packet has more bytes than this, in all of its parts.
pub(crate) const LONGEST: usize = 16 << 20;

/// Returns the packets of a list, in order.
///
/// One that is just being taken off leads nowhere any more: what comes behind it is then found from the list's other
/// end.
///
/// # Errors
///
/// Those of reading; a list that goes round elsewhere is corrupt.
pub(crate) fn packets<'k>(owner: Object<'k>, path: &'static str) -> Result<Vec<Object<'k>>> {
    let head = owner.address_of(path)?;
    let mut seen = HashSet::from([head]);
    let mut forwards = Vec::new();
    if follow(owner, head, "next", &mut seen, &mut forwards)? {
        return Ok(forwards);
    }
    let mut backwards = Vec::new();
    follow(owner, head, "prev", &mut seen, &mut backwards)?;
    forwards.extend(backwards.into_iter().rev());
    Ok(forwards)
}

/// Follows one direction, and gives whether it led round.
fn follow<'k>(
    owner: Object<'k>,
    head: u64,
    direction: &'static str,
    seen: &mut HashSet<u64>,
    found: &mut Vec<Object<'k>>,
) -> Result<bool> {
    let list = owner.kernel().object("sk_buff_head", head)?;
    let mut next = list.u64(direction)?;
    while next != head {
        if next == 0 {
            return Ok(false);
        }
        let packet = owner.kernel().object("sk_buff", next)?;
        if !seen.insert(next) {
            // Backwards, this is where the walk forwards had come to.
            return if direction == "prev" { Ok(true) } else { Err(packet.corrupt("its queue goes round")) };
        }
        if seen.len() > MOST_PACKETS {
            return Err(packet.corrupt("its queue never ends"));
        }
        found.push(packet);
        next = packet.u64(direction)?;
    }
    Ok(true)
}

/// A part of a packet that is in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    page: u64,
    offset: u32,
    length: u32,
}

impl Piece {
    /// Returns where it ends in its page; nothing of what cannot be a part.
    fn end(&self) -> Option<u32> {
        self.offset.checked_add(self.length).filter(|_| self.length <= LONGEST_PART)
    }
}

/// Returns how long a packet's linear part is: by where it ends, as its length alone may be ahead of it.
fn linear(packet: Object<'_>) -> Result<u32> {
    let (head, data) = (packet.u64("head")?, packet.u64("data")?);
    let end = head.wrapping_add(packet.u64("tail")?);
    let length = u32::try_from(end.wrapping_sub(data)).ok().filter(|&length| length <= LONGEST_PART);
    length.ok_or_else(|| packet.corrupt(format!("its bytes begin at {data:#x} and end at {end:#x}")))
}

fn shared(packet: Object<'_>) -> Result<Object<'_>> {
    let place = packet.u64("head")?.wrapping_add(packet.u64("end")?);
    packet.kernel().object("skb_shared_info", place)
}

/// All places for parts in pages, whether they are taken or not.
fn places(packet: Object<'_>) -> Result<Vec<Piece>> {
    let (kernel, shared) = (packet.kernel(), shared(packet)?);
    let size = kernel.types().size("skb_frag_t").or_else(|_| kernel.types().size("bio_vec"))?;
    let all = kernel.types().field("skb_shared_info", "frags")?;
    let first = shared.address_of("frags")?;
    let place = |index: u64| {
        let part = kernel.object("bio_vec", first.wrapping_add(index * size))?;
        Ok(Piece { page: part.u64("bv_page")?, offset: part.u32("bv_offset")?, length: part.u32("bv_len")? })
    };
    (0..(all.size / size.max(1)).min(MOST_PAGES)).map(place).collect()
}

/// Returns the parts in pages.
fn pieces(packet: Object<'_>) -> Result<Vec<Piece>> {
    let mut pieces = places(packet)?;
    pieces.truncate(shared(packet)?.u32("nr_frags")? as usize);
    match pieces.iter().find(|piece| piece.end().is_none()) {
        Some(Piece { offset, length, .. }) => {
            Err(packet.corrupt(format!("a part of {length} bytes {offset} bytes into a page")))
        }
        None => Ok(pieces),
    }
}

/// The same where the first ones may just be being dropped, while the others move up one after the other: one that is
/// there twice has moved.
fn moved_up(mut pieces: Vec<Piece>) -> Vec<Piece> {
    pieces.dedup_by_key(|piece| (piece.page, piece.end()));
    pieces
}

/// Returns how long the parts of a packet are: the linear one, and its pages.
pub(crate) fn parts(packet: Object<'_>) -> Result<Vec<u32>> {
    let mut lengths = vec![linear(packet)?];
    if packet.u32("data_len")? > 0 {
        lengths.extend(pieces(packet)?.iter().map(|piece| piece.length));
    }
    Ok(lengths)
}

/// Returns what a packet carries: its linear part, its pages, and the packets that hang on it.
pub(crate) fn carried(packet: Object<'_>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    append(packet, &mut HashSet::new(), &mut bytes, DEEPEST)?;
    Ok(bytes)
}

/// The same of a packet that nobody was changing: as long as it says.
pub(crate) fn whole(packet: Object<'_>) -> Result<Vec<u8>> {
    let (bytes, length) = (carried(packet)?, packet.u32("len")?);
    if bytes.len() != length as usize {
        return Err(packet.corrupt(format!("it holds {} bytes and should hold {length}", bytes.len())));
    }
    Ok(bytes)
}

/// Appends what a packet carries, which hangs on those that were seen.
fn append(packet: Object<'_>, seen: &mut HashSet<u64>, bytes: &mut Vec<u8>, deeper: u32) -> Result<()> {
    if !seen.insert(packet.address()) {
        return Err(packet.corrupt("it hangs on itself"));
    }
    let kernel = packet.kernel();
    let into = room(packet, linear(packet)?, bytes)?;
    kernel.read(packet.u64("data")?, into)?;
    if packet.u32("data_len")? == 0 {
        return Ok(());
    }
    for piece in pieces(packet)? {
        append_piece(packet, piece, bytes)?;
    }
    let mut more = shared(packet)?.pointer("frag_list", "sk_buff")?;
    while let Some(next) = more {
        if deeper == 0 {
            return Err(packet.corrupt("packets within packets within packets"));
        }
        append(next, seen, bytes, deeper - 1)?;
        more = next.pointer("next", "sk_buff")?;
    }
    Ok(())
}

/// Makes room for a part of a packet behind the others.
fn room<'b>(packet: Object<'_>, length: u32, bytes: &'b mut Vec<u8>) -> Result<&'b mut [u8]> {
    let start = bytes.len();
    let end = start.saturating_add(length as usize);
    if end > LONGEST {
        return Err(packet.corrupt(format!("its parts have {end} bytes and more")));
    }
    bytes.resize(end, 0);
    Ok(&mut bytes[start..])
}

fn append_piece(packet: Object<'_>, piece: Piece, bytes: &mut Vec<u8>) -> Result<()> {
    let kernel = packet.kernel();
    let physical = kernel.page_physical(piece.page)?.saturating_add(piece.offset.into());
    kernel.memory().read(physical, room(packet, piece.length, bytes)?)
}

/// Returns what is left of a packet whose first bytes are being dropped (`__pskb_trim_head`), as far as all is in
/// pages.
///
/// # Errors
///
/// Those of reading; corrupt where there are bytes elsewhere than in pages.
pub(crate) fn remaining(packet: Object<'_>) -> Result<Vec<u8>> {
    in_pages(packet, Some(moved_up(pieces(packet)?)), || "it is being dropped".to_owned())
}

/// Returns what a packet carried before its end was cut off, so many bytes behind its first `length`. They are to be
/// a packet of their own, which hangs nowhere yet (`skb_split`). Their pages still stand where they stood, but for
/// the one that is cut itself: that ends with the first `length` bytes from the moment on in which the other packet
/// has the rest.
///
/// # Errors
///
/// Those of reading; corrupt where these bytes cannot be found, or there are bytes elsewhere than in pages.
pub(crate) fn cut_off(packet: Object<'_>, length: u32, wanted: u32) -> Result<Vec<u8>> {
    let lost = || format!("{wanted} bytes that were behind its first {length} are not there");
    in_pages(packet, behind(&places(packet)?, length, wanted), lost)
}

/// The first bytes in a packet's pages, of which it may count some already as another one's.
///
/// # Errors
///
/// As [`cut_off`].
pub(crate) fn beginning(packet: Object<'_>, length: u32) -> Result<Vec<u8>> {
    in_pages(packet, up_to(&places(packet)?, length), || format!("it should hold {length} bytes"))
}

/// The bytes of these parts of a packet that has all in pages; corrupt, and why, where there are no such parts.
fn in_pages(packet: Object<'_>, pieces: Option<Vec<Piece>>, why: impl Fn() -> String) -> Result<Vec<u8>> {
    let lost = || packet.corrupt(why());
    if linear(packet)? > 0 {
        return Err(lost());
    }
    let mut bytes = Vec::new();
    for piece in pieces.ok_or_else(lost)? {
        append_piece(packet, piece, &mut bytes)?;
    }
    Ok(bytes)
}

/// So many bytes of parts; nothing where there are fewer, or one of them is none.
fn up_to(places: &[Piece], wanted: u32) -> Option<Vec<Piece>> {
    let (mut found, mut left) = (Vec::new(), wanted);
    for &place in places {
        if left == 0 {
            break;
        }
        place.end().filter(|_| place.length > 0)?;
        let length = place.length.min(left);
        found.push(Piece { length, ..place });
        left -= length;
    }
    (left == 0).then_some(found)
}

/// The parts behind the first `length` bytes, so many bytes; nothing where it may be one or the other.
fn behind(places: &[Piece], length: u32, wanted: u32) -> Option<Vec<Piece>> {
    let before = up_to(places, length)?;
    let (last, rest) = (before.last()?, &places[before.len()..]);
    let own = places[before.len() - 1];
    let from = |length| Piece { page: own.page, offset: own.offset + last.length, length };
    let whole = |first: Option<Piece>| {
        let left = wanted.checked_sub(first.map_or(0, |first| first.length))?;
        Some(first.into_iter().chain(up_to(rest, left)?).collect::<Vec<_>>())
    };
    if last.length < own.length {
        return whole(Some(from((own.length - last.length).min(wanted))));
    }
    // It ends there: because it is cut, or by itself. In the first case the rest reaches to the page's end, or is all
    // that there is.
    let ends = |parts: &Vec<Piece>| parts.last().is_none_or(|last| rest.contains(last));
    let by_itself = whole(None).filter(ends);
    let room = |size: u32| size.checked_sub(own.end()?).filter(|&room| room > 0);
    let cut = PAGES.into_iter().filter_map(room).find_map(|room| {
        if wanted <= room { Some(vec![from(wanted)]) } else { whole(Some(from(room))).filter(ends) }
    });
    match (by_itself, cut) {
        (Some(_), Some(_)) => None,
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_moved_up_counts_once_and_what_cannot_be_is_no_part() {
        let piece = |page, offset, length| Piece { page, offset, length };
        // The first one is gone, half of the second, too, and the third has not moved yet.
        let parts = vec![piece(2, 100, 100), piece(2, 0, 200), piece(3, 0, 300)];
        assert_eq!(moved_up(parts), [piece(2, 100, 100), piece(3, 0, 300)]);
        let garbage = [piece(1, u32::MAX, 2), piece(1, 0, u32::MAX), piece(1, u32::MAX - 1, u32::MAX)];
        assert!(garbage.iter().all(|piece| piece.end().is_none()));
        assert!(garbage.iter().all(|&piece| behind(&[piece], 1, 1).is_none()));
        assert_eq!(up_to(&[piece(1, 0, 0)], 1), None);
    }

    #[test]
    fn what_is_cut_off_is_told_before_and_after_the_cut() {
        let piece = |page, offset, length| Piece { page, offset, length };
        // Three parts: the end of a page, a whole one, the beginning of another.
        let parts = [piece(1, 30_000, 2768), piece(2, 0, 32768), piece(3, 0, 464), piece(9, 7, 7)];
        let rest = Some(vec![piece(2, 7232, 25536), piece(3, 0, 464)]);
        assert_eq!(behind(&parts, 10_000, 26_000), rest);
        let mut cut = parts;
        cut[1].length = 7232;
        assert_eq!(behind(&cut, 10_000, 26_000), rest);
        // Within the last one.
        assert_eq!(behind(&parts, 35_600, 400), Some(vec![piece(3, 64, 400)]));
        cut = parts;
        cut[2].length = 64;
        assert_eq!(behind(&cut, 35_600, 400), Some(vec![piece(3, 64, 400)]));
        // Between two.
        assert_eq!(behind(&parts, 2768, 33_232), Some(vec![piece(2, 0, 32768), piece(3, 0, 464)]));
        // More than there is, and what may be the one or the other.
        assert_eq!(behind(&parts, 10_000, 90_000), None);
        let both = [piece(1, 0, 100), piece(2, 0, 50)];
        assert_eq!(behind(&both, 100, 50), None);
        assert_eq!(up_to(&both, 120), Some(vec![piece(1, 0, 100), piece(2, 0, 20)]));
        assert_eq!(up_to(&[piece(1, 0, 100), piece(0, 0, 0)], 120), None);
    }
}
