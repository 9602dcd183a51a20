//! What a program and a manager say to each other about upcalls: plain bytes at the manager's socket, since a program's library knows
//! nothing of a manager's other messages.

/// What a program sends. No other message of the socket begins so.
pub const REGISTER: &[u8] = b"orrery upcalls 1";
/// The reply, with two descriptors: the queue, and the state.
pub const REGISTERED: &[u8] = b"orrery registered 1";
/// What a refusal begins with; the reason follows.
pub const REFUSED: &[u8] = b"orrery refused: ";
/// The longest reply, in bytes.
pub const LONGEST: usize = 512;
