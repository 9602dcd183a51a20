//! Messages of other processes.

use orrery_orc_wire::protocol::{Reply, Request, decode_reply, decode_request};
use orrery_orthros_wire as guest;
use serde::{Deserialize, Serialize};

/// What clients of the store send: what was decoded is encoded as something that is decoded to the same.
pub(super) fn orc_request(input: &[u8]) {
    let Ok((tag, request)) = decode_request(input) else { return };
    let encoded: Vec<u8> = Request::encode(&request, tag);
    assert_eq!(decode_request(&encoded), Ok((tag, request)));
}

/// What a store, or who takes its place, sends to its clients.
pub(super) fn orc_reply(input: &[u8]) {
    let Some((tag, reply)) = decode_reply(input) else { return };
    let encoded: Vec<u8> = Reply::encode(&reply, tag);
    assert_eq!(decode_reply(&encoded), Some((tag, reply)));
}

/// What a host sends into a guest.
pub(super) fn guest_request(input: &[u8]) {
    if let Some((message, decoded)) = again::<guest::Request>(input) {
        assert_eq!(decoded, message);
    }
}

/// What a guest, whose kernel may have died, prints to its host. Times are floating-point numbers, which need not be the same again.
pub(super) fn guest_report(input: &[u8]) {
    let _both = again::<guest::Report>(input);
}

/// A message that was decoded, and what its encoding is decoded to.
fn again<T: for<'l> Deserialize<'l> + Serialize>(input: &[u8]) -> Option<(T, T)> {
    let message = guest::decode::<T>(input).ok()?;
    let encoded =
        guest::encode(&message).unwrap_or_else(|error| panic!("cannot encode what was decoded: {error}"));
    assert!(encoded.ends_with(b"\n") && !encoded[..encoded.len() - 1].contains(&b'\n'));
    let decoded =
        guest::decode(&encoded).unwrap_or_else(|error| panic!("cannot decode what was encoded: {error}"));
    Some((message, decoded))
}

/// What a task of an orbit sends to main.
pub(super) fn orbit_update(input: &[u8]) {
    orrery_orbit::fuzzing::update(input);
}
