//! A reader that checks what it reads against what was announced.

use std::io::{self, Read};

use aws_lc_rs::digest::{Context, SHA256, digest};
use orrery_orc_registry::digest::Digest;

/// What is wrong with bytes.
#[derive(Debug)]
pub(crate) enum Problem {
    /// They end before they should.
    Broken {
        /// What happened.
        error: io::Error,
        /// The number of bytes that came.
        read: u64,
    },
    /// There are more than announced.
    Longer,
    /// They are others.
    Other(Digest),
    /// Some were not read.
    Unread,
}

/// Reads bytes, no more than announced, and computes their hash.
pub(crate) struct Checked<R> {
    from: R,
    hash: Context,
    size: u64,
    left: u64,
    wanted: Digest,
    problem: Option<Problem>,
    is_whole: bool,
}

impl<R: Read> Checked<R> {
    pub(crate) fn new(from: R, size: u64, wanted: Digest) -> Self {
        let hash = Context::new(&SHA256);
        Self { from, hash, size, left: size, wanted, problem: None, is_whole: false }
    }

    /// Returns the number of bytes that were not read yet.
    pub(crate) fn left(&self) -> u64 {
        self.left
    }

    /// Returns what is wrong with the bytes.
    pub(crate) fn finish(self) -> Option<Problem> {
        let found = finished(self.hash);
        match self.problem {
            Some(problem) => Some(problem),
            None if !self.is_whole => Some(Problem::Unread),
            None => (self.wanted != found).then_some(Problem::Other(found)),
        }
    }
}

impl<R: Read> Read for Checked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.problem.is_some() {
            return Err(io::Error::other("the connection to the registry has ended"));
        }
        if self.is_whole || buffer.is_empty() {
            return Ok(0);
        }
        let mut one_more = [0];
        let is_end = self.left == 0;
        let take = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let into = if is_end { &mut one_more[..] } else { &mut buffer[..take] };
        let count = loop {
            match self.from.read(into) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other,
            }
        };
        let problem = match count {
            Ok(0) if is_end => {
                self.is_whole = true;
                return Ok(0);
            }
            Ok(0) => {
                let error = io::Error::new(io::ErrorKind::UnexpectedEof, "there is no more");
                Problem::Broken { error, read: self.size - self.left }
            }
            Ok(_) if is_end => Problem::Longer,
            Ok(count) => {
                self.hash.update(&buffer[..count]);
                self.left -= count as u64;
                return Ok(count);
            }
            Err(error) => Problem::Broken { error, read: self.size - self.left },
        };
        self.problem = Some(problem);
        Err(io::Error::other("the connection to the registry has ended"))
    }
}

fn finished(hash: Context) -> Digest {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(hash.finish().as_ref());
    Digest(bytes)
}

/// Returns the digest of bytes.
pub(crate) fn digest_of(bytes: &[u8]) -> Digest {
    let mut found = [0; 32];
    found.copy_from_slice(digest(&SHA256, bytes).as_ref());
    Digest(found)
}

/// Reads a file to its end and returns both its names and its length.
pub(crate) fn names_of(mut from: impl Read) -> io::Result<(Digest, orrery_orc_wire::ObjectId, u64)> {
    let (mut sha256, mut blake3, mut length) = (Context::new(&SHA256), blake3::Hasher::new(), 0);
    let mut buffer = vec![0; 256 << 10];
    loop {
        match from.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
            Ok(0) => {
                let id = orrery_orc_wire::ObjectId(*blake3.finalize().as_bytes());
                return Ok((finished(sha256), id, length));
            }
            Ok(count) => {
                sha256.update(&buffer[..count]);
                blake3.update(&buffer[..count]);
                length += count as u64;
            }
        }
    }
}
