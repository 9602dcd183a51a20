//! Shares of packet delivery: streams with a high share lose nothing while others flood.
//!
//! What a machine cannot process is dropped in any case. Without help, it is dropped where it is most expensive: after it was
//! queued, its receiver was woken, and with no regard to who needs it. Here, what would be too much is dropped at the sockets with the lowest
//! shares, by a filter with random bits, as the packet arrives: it wakes nobody, and its CPU time is left to the others.
//!
//! ```text
//!  each 10 ms:   Stream::look (SO_MEMINFO) --> Loads --> Steering::step --> drop rates --> Stream::drop_part (SO_ATTACH_FILTER)
//! ```
//!
//! The queue of a stream with a share can be made longer ([`Stream::raise_limit`]), so that nothing is lost of what arrives while its receiver
//! has to wait: for as long as the kernel runs ordinary programs that real-time threads have kept waiting, 50 ms in a second.
//!
//! Filters need no privilege on one's own sockets. Those of another process are had by [`Stream::of_process`], with the right to
//! trace it, and by [`Remote`], which leaves no copy of them open.

mod steering;
mod stream;

pub use steering::{Load, Share, Steering};
pub use stream::{PacketsError, RaisedLimit, Remote, Stream, may_steer, sockets_of};
