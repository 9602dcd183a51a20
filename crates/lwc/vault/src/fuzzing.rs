//! What fuzz targets call, and nobody else.

use crate::message::{LOAD_ROOM, Request, decode_answer, encode_answer};

/// Decodes a message as a request and as an answer.
///
/// # Panics
/// If what was decoded is encoded as something that is not decoded to the same.
pub fn message(input: &[u8]) {
    if let Some(request) = Request::decode(input) {
        assert_eq!(Request::decode(&request.encode()), Some(request));
        assert!(!matches!(request, Request::Load(body) if body.len() > LOAD_ROOM));
    }
    let answer = decode_answer(input);
    assert_eq!(decode_answer(&encode_answer(answer)), answer);
}
