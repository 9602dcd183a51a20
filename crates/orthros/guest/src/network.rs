//! The network of a guest: its interface, what the service makes of it, and packets that help connections over a failover.

pub(crate) mod configuration;
pub(crate) mod datagrams;
pub(crate) mod interface;
pub(crate) mod loopback;
mod packet;
pub(crate) mod resets;
pub(crate) mod tcp_kick;
