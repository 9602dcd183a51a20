//! References to what a registry has: `HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]`.

use std::fmt;
use std::str::FromStr;

use crate::digest::Digest;

/// The name of the registry of Docker's images, which is served by another host.
const DOCKER: &str = "docker.io";

/// A reference to a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The host of the registry, with its port where it is named.
    pub host: String,
    /// The repository.
    pub repository: String,
    /// The tag, if one is named.
    pub tag: Option<String>,
    /// The digest of the manifest, if it is named.
    pub digest: Option<Digest>,
}

/// A text is no reference.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read the reference '{text}': {reason}; write HOST[:PORT]/REPOSITORY[:TAG][@sha256:DIGEST]")]
pub struct ParseReferenceError {
    text: String,
    reason: &'static str,
}

impl Reference {
    /// Returns what stands for the manifest in the paths of the registry: its digest, else the tag, else `latest`.
    pub fn manifest(&self) -> String {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => "latest".to_owned(),
        }
    }

    /// Returns the host that serves the registry.
    pub fn server(&self) -> &str {
        if self.host == DOCKER { "registry-1.docker.io" } else { &self.host }
    }

    /// Returns whether the host is this machine.
    pub fn is_loopback(&self) -> bool {
        let host = self.host.rsplit_once(':').map_or(self.host.as_str(), |(host, _)| host);
        let address = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
        host == "localhost" || address.is_ok_and(|address| address.is_loopback())
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.host, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

/// Whether a text can be part of a host's name, with its port.
fn is_host(text: &str) -> bool {
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        _ => (text, None),
    };
    let is_port = port.is_none_or(|port| port.parse::<u16>().is_ok_and(|port| port > 0));
    let is_name = match name.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            let mut parts = name.split('.');
            parts.all(|part| {
                !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
            })
        }
    };
    is_port && is_name && (name.contains(['.', '[']) || port.is_some() || name == "localhost")
}

/// Whether a text is a repository: names in lower case, with slashes between them.
pub(crate) fn is_repository(text: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_name = |name: &str| {
        let bytes = name.as_bytes();
        bytes.iter().all(|byte| is_word(*byte) || matches!(byte, b'.' | b'_' | b'-'))
            && bytes.first().is_some_and(|byte| is_word(*byte))
            && bytes.last().is_some_and(|byte| is_word(*byte))
            && !name.contains("..")
    };
    text.len() <= 255 && text.split('/').all(is_name)
}

fn is_tag(text: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.len() <= 128
        && text.bytes().next().is_some_and(is_word)
        && text.bytes().all(|byte| is_word(byte) || matches!(byte, b'.' | b'-'))
}

impl FromStr for Reference {
    type Err = ParseReferenceError;

    fn from_str(text: &str) -> Result<Self, ParseReferenceError> {
        let bad = |reason| ParseReferenceError { text: text.chars().take(300).collect(), reason };
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => {
                let digest = digest.parse().map_err(|_| bad("what follows @ is no SHA-256 digest"))?;
                (rest, Some(digest))
            }
            None => (text, None),
        };
        let (host, rest) =
            rest.split_once('/').ok_or_else(|| bad("it has no host of a registry before a /"))?;
        if !is_host(host) {
            return Err(bad("what stands before the first / is no host: it has no dot and no port"));
        }
        let (repository, tag) = match rest.split_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (rest, None),
        };
        if !is_repository(repository) {
            return Err(bad("a repository has lower-case letters, digits, dots, dashes and slashes"));
        }
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(bad("a tag has at most 128 letters, digits, dots, dashes and underscores"));
        }
        let is_official = host == DOCKER && !repository.contains('/');
        let repository = if is_official { format!("library/{repository}") } else { repository.to_owned() };
        Ok(Self { host: host.to_owned(), repository, tag: tag.map(str::to_owned), digest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_read_as_they_are_written() {
        let digest = format!("sha256:{}", "ab".repeat(32));
        for text in [
            "registry.example/a/b:1.0",
            "localhost/x",
            "127.0.0.1:5000/x_y:latest",
            "[::1]:5000/x",
            "host:5000/a--b/c.d:T",
            &format!("registry.example/x@{digest}"),
            &format!("registry.example/x:tag@{digest}"),
        ] {
            assert_eq!(text.parse::<Reference>().map(|read| read.to_string()).as_deref(), Ok(text), "{text}");
        }
        for text in [
            "",
            "x",
            "a/b",
            "host:0/x",
            "host:99999/x",
            "user@host.example/x",
            "registry.example/../x",
            "registry.example/a//b",
            "registry.example/A",
            "registry.example/x:",
            "registry.example/x:a b",
            "registry.example/x:a?b",
            "registry.example/x@sha256:ab",
            "https://registry.example/x",
            "reg\nistry.example/x",
        ] {
            assert!(text.parse::<Reference>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_stands_for_a_manifest_is_the_digest_before_the_tag() {
        let read = |text: &str| text.parse::<Reference>().unwrap();
        assert_eq!(read("localhost/x").manifest(), "latest");
        assert_eq!(read("localhost/x:1").manifest(), "1");
        let digest = format!("sha256:{}", "ab".repeat(32));
        assert_eq!(read(&format!("localhost/x:1@{digest}")).manifest(), digest);
        assert_eq!(read("docker.io/debian").repository, "library/debian");
        assert_eq!(read("docker.io/debian").server(), "registry-1.docker.io");
        assert!(read("localhost:5000/x").is_loopback() && read("[::1]:5/x").is_loopback());
        assert!(!read("127.0.0.1.example/x").is_loopback() && !read("localhost.example/x").is_loopback());
    }
}
