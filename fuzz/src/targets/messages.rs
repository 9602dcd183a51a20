//! Messages of other processes.

use std::time::Duration;

use orrery_orc_wire::ObjectId;
use orrery_orc_wire::protocol::{
    FileRangeReply, Handle, Refusal, Reply, Request, decode_reply, decode_request,
};
use orrery_orthros_wire as guest;
use orrery_warm::protocol as warm;
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

/// One reply of each kind.
pub(super) fn orc_replies() -> Vec<Vec<u8>> {
    let handle = Handle { id: ObjectId::of(b"object"), offset: 4096, length: 100, flags: 1 };
    let range = FileRangeReply { refusal: Some(Refusal::Quota), duplicate: true, offset: 8192 };
    [
        Reply::Handle(handle),
        Reply::Released,
        Reply::FileRanges(vec![range, FileRangeReply { refusal: None, ..range }]),
        Reply::Report { length: 7 },
        Reply::PlacementTable { length: 4096 },
        Reply::Refused(Refusal::Mismatch),
        Reply::Restarted,
    ]
    .iter()
    .map(|reply| reply.encode(9))
    .collect()
}

/// What a registry sends as the listing of a tree: what was let through is written as something that is read as the same.
pub(super) fn registry_listing(input: &[u8]) {
    use orrery_orc_registry::listing::Listing;
    let Ok(listing) = Listing::parse(input) else { return };
    let encoded = listing.encode().unwrap_or_else(|error| panic!("cannot write what was read: {error}"));
    assert!(Listing::parse(&encoded).is_ok_and(|again| again == listing));
    for entry in listing.tree().entries() {
        let is_name = |part| matches!(part, std::path::Component::Normal(_));
        assert!(entry.path.components().all(is_name), "{:?}", entry.path);
    }
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

/// What programs ask of a vault's keeper, and what they take for its answers.
pub(super) fn vault_message(input: &[u8]) {
    orrery_vault::fuzzing::message(input);
}

/// What clients ask of warm interpreters.
pub(super) fn warm_request(input: &[u8]) {
    if let Ok(request) = warm::decode::<warm::Request<'_>>(input) {
        let frame = warm::encode(&request);
        // Longer ones are refused before they are decoded.
        let Ok(frame) = frame else { return };
        let again = warm::decode::<warm::Request<'_>>(&frame[WARM_HEADER..]);
        assert!(again.is_ok_and(|again| again == request));
    }
    if let Ok(question) = warm::decode::<warm::Question>(input) {
        let frame = warm::encode(&question).unwrap_or_default();
        assert!(warm::decode(&frame[WARM_HEADER..]).is_ok_and(|again: warm::Question| again == question));
    }
}

/// What a server of warm interpreters, or who takes its place, answers.
pub(super) fn warm_reply(input: &[u8]) {
    if let Ok(reply) = warm::decode::<warm::Reply>(input) {
        let Ok(frame) = warm::encode(&reply) else { return };
        assert!(warm::decode(&frame[WARM_HEADER..]).is_ok_and(|again: warm::Reply| again == reply));
    }
}

/// What a script writes as the header of its answer to an HTTP request: what is passed on is what HTTP can carry, and says the same again.
pub(super) fn script_answer(input: &[u8]) {
    use orrery_warm_http::answer::parse;
    let Ok(Some((head, length))) = parse(input) else { return };
    assert!(length <= input.len() && (200..600).contains(&head.status));
    let mut again = format!("Status: {}\r\n", head.status).into_bytes();
    for (name, value) in &head.fields {
        assert!(!value.iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0)), "{name}");
        assert!(
            !matches!(name.as_str(), "connection" | "transfer-encoding" | "upgrade" | "status"),
            "{name}"
        );
        again.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
    }
    again.extend(b"\r\n");
    assert_eq!(parse(&again), Ok(Some((head, again.len()))));
    // What follows, and that more is to come, makes no difference.
    assert_eq!(parse(&input[..length]), parse(input));
    assert_eq!(parse(&input[..length - 1]), Ok(None));
}

/// Returns a request of each kind, and a question of each.
pub(super) fn warm_requests() -> Vec<Vec<u8>> {
    let program = [
        warm::Program::Script { path: b"/tmp/x.py" },
        warm::Program::Command { text: b"print(1)" },
        warm::Program::Module { name: b"a.b" },
        warm::Program::Stdin { dash: true },
    ];
    let request = |program| warm::Request {
        id: warm::RequestId([7; 16]),
        program,
        arguments: vec![b"a", b""],
        environment: b"A=1\0B=2\0",
        directory: b"/home",
        umask: 0o22,
        streams: 7,
        ignored_signals: 1 << 12,
        options: warm::Options { warnings: vec![b"error"], ..warm::Options::default() },
    };
    let requests = program.map(|program| body(warm::encode(&request(program))));
    let questions = [warm::Question::Fate(warm::RequestId([7; 16])), warm::Question::Health];
    requests.into_iter().chain(questions.map(|question| body(warm::encode(&question)))).collect()
}

/// Returns a reply of each kind, with an outcome of each.
pub(super) fn warm_replies() -> Vec<Vec<u8>> {
    let outcomes = [
        warm::Outcome::Exited(3),
        warm::Outcome::Signaled(9),
        warm::Outcome::TimedOut { limit: Duration::from_millis(1500) },
        warm::Outcome::MemoryLimit { limit: 1 << 30 },
        warm::Outcome::Cancelled,
        warm::Outcome::Refused("no".to_owned()),
    ];
    let worker = warm::WorkerHealth { pid: 7, ready: true, busy: false, served: 300 };
    let health = warm::Health { uptime: 9, served: 300, restarts: 1, workers: vec![worker.clone(), worker] };
    let fates = outcomes.map(|outcome| warm::Reply::Fate(warm::Fate::Died(outcome)));
    let others = [warm::Reply::Fate(warm::Fate::NotBegun), warm::Reply::Health(health)];
    fates.into_iter().chain(others).map(|reply| body(warm::encode(&reply))).collect()
}

/// Returns what is behind a frame's header.
fn body(frame: Result<Vec<u8>, warm::Error>) -> Vec<u8> {
    frame.map(|frame| frame[WARM_HEADER..].to_vec()).unwrap_or_default()
}

/// Bytes of a frame before its body.
const WARM_HEADER: usize = 12;

/// What a task of an orbit sends to main.
pub(super) fn orbit_update(input: &[u8]) {
    orrery_orbit::fuzzing::update(input);
}
