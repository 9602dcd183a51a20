//! What clients and servers exchange: requests of 8 bytes, documents of one letter.

use anyhow::{Context, Result};

/// How many clients ask at the same time.
pub(super) const CLIENTS: usize = 300;
/// The longest document.
pub(super) const LONGEST: usize = 9999;
/// The length of a request: `0045 L\r\n`, with `L` for the last one on a connection, else `G`.
pub(super) const REQUEST: usize = 8;

/// What a case asks for: `45*16` is 16 documents of 45 bytes on each connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Demand {
    pub(super) document: usize,
    pub(super) requests: u32,
}

impl std::str::FromStr for Demand {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let parsed = text.split_once('*').and_then(|(document, requests)| {
            Some(Self { document: document.parse().ok()?, requests: requests.parse().ok()? })
        });
        parsed
            .filter(|demand| demand.document <= LONGEST && demand.requests > 0)
            .with_context(|| format!("{text:?} is not DOCUMENT*REQUESTS, such as 45*16"))
    }
}

/// Returns the length of the document that a request asks for, and whether it is the last request.
pub(super) fn read_request(request: &[u8]) -> Option<(usize, bool)> {
    let length: usize = str::from_utf8(request.get(..4)?).ok()?.parse().ok()?;
    Some((length.min(LONGEST), request.get(5) == Some(&b'L')))
}

/// Returns the request of a client.
pub(super) fn request(demand: Demand, last: bool) -> [u8; REQUEST] {
    let text = format!("{:04} {}\r\n", demand.document, if last { 'L' } else { 'G' });
    let mut request = [b' '; REQUEST];
    for (place, byte) in request.iter_mut().zip(text.bytes()) {
        *place = byte;
    }
    request
}
