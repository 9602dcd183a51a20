//! Registries whose answers are made by hand.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use orrery_orc_registry::digest::Digest;
use orrery_orc_registry::listing::{Content, Listing};
use orrery_orc_rootfs::Attributes;
use orrery_orc_rootfs::tree::{Entry, Kind, Tree};
use orrery_orc_wire::ObjectId;
use serde_json::{Value, json};

/// Returns the digest of bytes.
pub(crate) fn digest(bytes: &[u8]) -> String {
    let hash = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, bytes);
    let digits: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

/// A request: its first line without the version, and all of its head.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) line: String,
    pub(crate) head: String,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.filter(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value).next()
    }
}

/// What is sent for a request, whole and with its head; then the connection is closed.
#[derive(Clone)]
pub(crate) enum Reply {
    Bytes(Vec<u8>),
    /// These, and then nothing for as long as the server lives.
    Hang(Vec<u8>),
    /// These, and then a byte each time that so much has passed.
    Drip(Vec<u8>, Duration),
}

pub(crate) fn ok(body: &[u8]) -> Reply {
    status(200, "", body)
}

/// An answer with further lines of its head, which end in `\r\n`.
pub(crate) fn status(status: u16, head: &str, body: &[u8]) -> Reply {
    let head =
        format!("HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {}\r\n{head}\r\n", body.len());
    Reply::Bytes([head.as_bytes(), body].concat())
}

/// A registry that answers what a function returns.
pub(crate) struct Fake {
    pub(crate) port: u16,
    requests: Arc<Mutex<Vec<Request>>>,
    is_over: Arc<AtomicBool>,
}

impl Fake {
    pub(crate) fn new(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests: Arc<Mutex<Vec<Request>>> = Arc::default();
        let is_over: Arc<AtomicBool> = Arc::default();
        let (log, over, answer) = (Arc::clone(&requests), Arc::clone(&is_over), Arc::new(answer));
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                if over.load(Ordering::Relaxed) {
                    return;
                }
                let (log, over, answer) = (Arc::clone(&log), Arc::clone(&over), Arc::clone(&answer));
                std::thread::spawn(move || {
                    // Clients end connections as they like.
                    let _ = serve(connection, &log, &over, &*answer);
                });
            }
        });
        Self { port, requests, is_over }
    }

    /// The requests so far, `METHOD PATH`.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.requests.lock().unwrap().iter().map(|request| request.line.clone()).collect()
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    pub(crate) fn reference(&self, name: &str) -> String {
        format!("127.0.0.1:{}/{name}", self.port)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

fn serve(
    mut connection: TcpStream,
    log: &Mutex<Vec<Request>>,
    is_over: &AtomicBool,
    answer: &dyn Fn(&Request) -> Reply,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        connection.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let line = head.split(" HTTP/").next().unwrap().to_owned();
    let request = Request { line, head };
    let length = request.header("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
    std::io::copy(&mut (&mut connection).take(length), &mut std::io::sink())?;
    log.lock().unwrap().push(request.clone());
    let is_head = request.line.starts_with("HEAD ");
    match answer(&request) {
        Reply::Bytes(bytes) if is_head => {
            let end = bytes.windows(4).position(|part| part == b"\r\n\r\n").unwrap() + 4;
            connection.write_all(&bytes[..end])
        }
        Reply::Bytes(bytes) => connection.write_all(&bytes),
        Reply::Hang(bytes) => {
            connection.write_all(&bytes)?;
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(20));
            }
            Ok(())
        }
        Reply::Drip(bytes, pause) => {
            connection.write_all(&bytes)?;
            while !is_over.load(Ordering::Relaxed) {
                connection.write_all(b"x")?;
                std::thread::sleep(pause);
            }
            Ok(())
        }
    }
}

/// A tree that a registry has: what it answers for each path.
#[derive(Clone)]
pub(crate) struct Served(pub(crate) HashMap<String, Reply>);

impl Served {
    /// A tree with these files.
    pub(crate) fn tree(files: &[(&str, &[u8])]) -> Self {
        let attributes = |mode| Attributes { mode, ..Attributes::default() };
        let mut entries =
            vec![Entry { path: PathBuf::new(), kind: Kind::Directory, attributes: attributes(0o755) }];
        let mut contents = HashMap::new();
        for (path, bytes) in files {
            let (id, size) = (ObjectId::of(bytes), bytes.len() as u64);
            let digest: Digest = digest(bytes).parse().unwrap();
            contents.insert(id, Content { digest, id, size });
            let kind = Kind::File { id, length: size };
            entries.push(Entry { path: path.into(), kind, attributes: attributes(0o644) });
        }
        let listing = Listing::new(Tree::new(entries).unwrap(), &contents).unwrap().encode().unwrap();
        Self::listing(&listing, files)
    }

    /// What claims to be a tree.
    pub(crate) fn listing(listing: &[u8], files: &[(&str, &[u8])]) -> Self {
        let layers: Vec<Value> = files.iter().map(|(_, bytes)| {
            json!({"mediaType": "application/vnd.orrery.content.v1", "digest": digest(bytes), "size": bytes.len()})
        }).collect();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": "application/vnd.orrery.tree.v1",
            "config": {"mediaType": "application/vnd.orrery.tree.v1+json", "digest": digest(listing), "size": listing.len()},
            "layers": layers,
        });
        let mut served = Self(HashMap::new());
        served.set("manifests/latest", ok(manifest.to_string().as_bytes()));
        served.set(&format!("blobs/{}", digest(listing)), ok(listing));
        for (_, bytes) in files {
            served.set(&format!("blobs/{}", digest(bytes)), ok(bytes));
        }
        served
    }

    /// Has something else answered for a path of the repository.
    pub(crate) fn set(&mut self, path: &str, reply: Reply) {
        self.0.insert(format!("/v2/x/{path}"), reply);
    }

    pub(crate) fn answer(&self, request: &Request) -> Reply {
        let path = request.line.split(' ').nth(1).unwrap();
        self.0.get(path).cloned().unwrap_or_else(|| status(404, "", b""))
    }

    pub(crate) fn serve(self) -> Fake {
        Fake::new(move |request| self.answer(request))
    }
}
