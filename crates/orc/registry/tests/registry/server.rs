//! Debian's docker-registry on a free port, with a directory of its own.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Command, Stdio};

use orrery_testing::{Killed, until};

pub(crate) struct Server {
    directory: tempfile::TempDir,
    _process: Killed,
    pub(crate) port: u16,
}

impl Server {
    /// `None`, with a remark, where there is no docker-registry.
    pub(crate) fn new() -> Option<Self> {
        Self::with("", "")
    }

    /// One with further lines of configuration: of `http`, and at the top.
    pub(crate) fn with(http: &str, more: &str) -> Option<Self> {
        if !orrery_testing::is_there("docker-registry") {
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        // Another process may take the port in between.
        for _ in 0..20 {
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
            let config = format!(
                "version: 0.1\nlog:\n  level: warn\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  \
                 addr: 127.0.0.1:{port}\n{http}{more}",
                directory.path().join("blobs").display()
            );
            let path = directory.path().join("config.yml");
            fs::write(&path, config).unwrap();
            let log = File::create(directory.path().join("log")).unwrap();
            let mut process = Killed(
                Command::new("docker-registry")
                    .arg("serve")
                    .arg(&path)
                    .stdin(Stdio::null())
                    .stdout(log.try_clone().unwrap())
                    .stderr(log)
                    .spawn()
                    .unwrap(),
            );
            let is_up = until("the registry listens", || {
                let is_dead = process.try_wait().unwrap().is_some();
                let is_up = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok();
                (is_dead || is_up).then_some(!is_dead)
            });
            if is_up && process.try_wait().unwrap().is_none() {
                return Some(Self { directory, _process: process, port });
            }
        }
        panic!("{}", fs::read_to_string(directory.path().join("log")).unwrap());
    }

    pub(crate) fn reference(&self, name: &str) -> String {
        format!("127.0.0.1:{}/{name}", self.port)
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// The requests that were logged, `METHOD PATH`.
    pub(crate) fn requests(&self) -> Vec<String> {
        let log = fs::read_to_string(self.directory.path().join("log")).unwrap();
        let requests = log.lines().filter_map(|line| line.split('"').nth(1)?.strip_suffix(" HTTP/1.1"));
        requests.map(str::to_owned).collect()
    }

    /// The number of requests with this method, of what has this in its path.
    pub(crate) fn count(&self, method: &str, part: &str) -> usize {
        let is_one = |request: &&String| request.starts_with(&format!("{method} ")) && request.contains(part);
        self.requests().iter().filter(is_one).count()
    }

    /// Puts a blob into the registry, and returns its digest.
    pub(crate) fn put_blob(&self, repository: &str, bytes: &[u8]) -> String {
        let begun = ureq::post(self.url(&format!("/v2/{repository}/blobs/uploads/"))).send_empty().unwrap();
        let place = begun.headers()["location"].to_str().unwrap().to_owned();
        let digest = crate::fake::digest(bytes);
        let separator = if place.contains('?') { '&' } else { '?' };
        let put = ureq::put(format!("{place}{separator}digest={digest}")).send(bytes).unwrap();
        assert_eq!(put.status(), 201);
        digest
    }

    /// Puts a manifest into the registry.
    pub(crate) fn put_manifest(&self, name: &str, media_type: &str, text: &str) {
        let (repository, tag) = name.split_once(':').unwrap();
        let url = self.url(&format!("/v2/{repository}/manifests/{tag}"));
        let put = ureq::put(url).header("content-type", media_type).send(text).unwrap();
        assert_eq!(put.status(), 201);
    }
}
