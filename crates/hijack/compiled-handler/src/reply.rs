//! What the compiler's program writes: what it is for, and a handler or a reason.

use orrery_hijack_image::handler::LAYOUT;
use serde::{Deserialize, Serialize};

use crate::{Handler, Invalid, LARGEST_CODE, MOST_CONSTANTS};

/// What the bytes begin with; [`LAYOUT`] follows.
const MAGIC: [u8; 8] = *b"orrhandl";
const HEAD: usize = 2 * size_of::<u64>();
/// The longest number, in the form of postcard.
const LONGEST_NUMBER: usize = 10;
/// The most bytes that a reply has.
pub const LARGEST_REPLY: usize = LARGEST_CODE + LONGEST_NUMBER * MOST_CONSTANTS + (256 << 10);

/// What the compiler says about a module.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// What it has made of it.
    Compiled(Handler),
    /// Why it is no handler, and where.
    Refused(String),
}

/// Returns a reply's bytes.
///
/// # Errors
/// There is no memory for them.
pub fn encode(reply: &Reply) -> Result<Vec<u8>, postcard::Error> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(LAYOUT.to_le_bytes());
    postcard::to_extend(reply, bytes)
}

/// Reads a reply; a handler in it was [checked](Handler::check).
///
/// # Errors
/// It is none, or of a compiler for another executive, or its handler is none.
pub fn decode(bytes: &[u8]) -> Result<Reply, Invalid> {
    if bytes.len() > LARGEST_REPLY {
        return Err(Invalid::Size { part: "whole", length: bytes.len(), limit: LARGEST_REPLY });
    }
    let (head, body) = bytes.split_first_chunk::<HEAD>().ok_or(Invalid::Form)?;
    let layout = head.strip_prefix(&MAGIC).ok_or(Invalid::Form)?;
    if layout != LAYOUT.to_le_bytes() {
        return Err(Invalid::Version);
    }
    let (reply, rest) = postcard::take_from_bytes::<Reply>(body).map_err(|_| Invalid::Form)?;
    if !rest.is_empty() {
        return Err(Invalid::Form);
    }
    if let Reply::Compiled(handler) = &reply {
        handler.check()?;
    }
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use orrery_hijack_image::handler::{MEMORY, STACK, needs};

    use super::*;

    fn handler() -> Handler {
        Handler {
            code: vec![0x31, 0xc0, 0xc3],
            entry: 0,
            data: vec![1, 2, 3],
            constants: vec![16, u64::MAX],
            globals: [7; _],
            stack: 512,
            needs: needs::MEMORY | needs::EMITS,
        }
    }

    fn decoded(change: impl FnOnce(&mut Handler)) -> Result<Reply, Invalid> {
        let mut handler = handler();
        change(&mut handler);
        decode(&encode(&Reply::Compiled(handler)).unwrap())
    }

    #[test]
    fn replies_survive() {
        for reply in [Reply::Compiled(handler()), Reply::Refused("it has no `decide`".to_owned())] {
            assert_eq!(decode(&encode(&reply).unwrap()), Ok(reply));
        }
        let largest = |handler: &mut Handler| {
            handler.code = vec![0x90; LARGEST_CODE];
            handler.data = vec![1; MEMORY];
            handler.constants = vec![u64::MAX; MOST_CONSTANTS];
        };
        assert!(decoded(largest).is_ok());
    }

    #[test]
    fn what_is_cut_or_longer_is_none() {
        let whole = encode(&Reply::Compiled(handler())).unwrap();
        for length in 0..whole.len() {
            assert_eq!(decode(&whole[..length]), Err(Invalid::Form), "{length}");
        }
        let mut longer = whole.clone();
        longer.push(0);
        assert_eq!(decode(&longer), Err(Invalid::Form));
        let huge = vec![0; LARGEST_REPLY + 1];
        assert!(matches!(decode(&huge), Err(Invalid::Size { part: "whole", .. })));
    }

    #[test]
    fn a_compiler_for_another_executive_is_named() {
        let mut other = encode(&Reply::Compiled(handler())).unwrap();
        other[MAGIC.len()] ^= 1;
        assert_eq!(decode(&other), Err(Invalid::Version));
        other[0] ^= 1;
        assert_eq!(decode(&other), Err(Invalid::Form));
    }

    #[test]
    fn each_part_is_checked() {
        let size = |part, length, limit| Err(Invalid::Size { part, length, limit });
        let value = |part, value| Err(Invalid::Value { part, value });
        let more = LARGEST_CODE + 1;
        assert_eq!(decoded(|handler| handler.code = vec![0x90; more]), size("code", more, LARGEST_CODE));
        assert_eq!(decoded(|handler| handler.data = vec![0; MEMORY + 1]), size("data", MEMORY + 1, MEMORY));
        let more = MOST_CONSTANTS + 1;
        assert_eq!(
            decoded(|handler| handler.constants = vec![0; more]),
            size("list of numbers", more, MOST_CONSTANTS)
        );
        assert_eq!(decoded(|handler| handler.entry = 3), value("entry", 3));
        assert_eq!(decoded(|handler| handler.code.clear()), value("entry", 0));
        let beyond = STACK.cast_signed() + 1;
        assert_eq!(decoded(|handler| handler.stack = beyond), value("rest of the stack", beyond));
        assert_eq!(decoded(|handler| handler.stack = -1), value("rest of the stack", -1));
        for wrong in [needs::ALL + 1, needs::EMITS, needs::WRITES, needs::REPLACES] {
            assert_eq!(decoded(|handler| handler.needs = wrong), value("set of needs", wrong.into()));
        }
        assert_eq!(
            decoded(|handler| handler.code = vec![0x90, 0x0f, 0x05]),
            Err(Invalid::Forbidden { instruction: "syscall", offset: 1 })
        );
    }
}
