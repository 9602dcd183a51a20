//! The client of a registry: the distribution specification of OCI 1.1 over HTTP/1.1.
//!
//! ureq speaks HTTP and rustls TLS. The crates that have the protocol as well (oci-client, oci-distribution) do not bound what a registry
//! sends, in bytes and in time, and follow its redirections by themselves; a registry that lies must cost no more here than an error.

use std::collections::HashMap;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use orrery_orc_registry::command::Connection;
use orrery_orc_registry::digest::Digest;
use orrery_orc_registry::manifest::{ACCEPT, MAX_MANIFEST};
use orrery_orc_registry::reference::Reference;
use ureq::http::{HeaderMap, Request, Response, Uri, header};
use ureq::tls::{Certificate, RootCerts, TlsConfig, TlsProvider};
use ureq::{Agent, AsSendBody, Body, SendBody};

use crate::auth::{self, Challenge, Credentials};
use crate::checked::{Checked, Problem, digest_of};

/// Redirections that are followed for one request.
const MAX_REDIRECTS: u32 = 5;

/// Times that a request is made again after a passing failure.
const MAX_RETRIES: u32 = 4;

/// The longest time that a registry has requests wait.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Bytes that have to come or go in a second.
const SLOWEST: u64 = 64 << 10;

/// Bytes of a registry's error, and of a token.
const MAX_TEXT: u64 = 1 << 20;

/// Bytes that are read of a blob that failed already, to find out whether it is the right one.
const MAX_DRAINED: u64 = 64 << 20;

/// What is sent.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    Nothing,
    Bytes(&'a [u8]),
    /// The first bytes of a file, as many as it had when it was read.
    File(&'a Path, u64),
}

impl Source<'_> {
    fn length(&self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File(_, length) => *length,
        }
    }
}

/// A request.
#[derive(Clone, Copy)]
struct Call<'a> {
    method: &'static str,
    accept: Option<&'static str>,
    content_type: Option<&'a str>,
    body: Source<'a>,
    /// Bytes that are expected to come, where that is known.
    expected: u64,
}

impl Call<'_> {
    fn get(expected: u64) -> Self {
        Self { method: "GET", accept: None, content_type: None, body: Source::Nothing, expected }
    }

    fn method(method: &'static str) -> Self {
        Self { method, ..Self::get(0) }
    }

    fn is_read(&self) -> bool {
        matches!(self.method, "GET" | "HEAD")
    }
}

/// A connection to one repository of a registry. Threads share it.
pub(crate) struct Client {
    agent: Agent,
    base: Uri,
    repository: String,
    /// What tokens have to allow.
    scopes: Vec<String>,
    credentials: Option<Credentials>,
    /// The value of the header that is sent at present.
    authorization: Mutex<Option<String>>,
    may_send_passwords: bool,
    plain_http: bool,
    timeout: Duration,
    is_verbose: bool,
    requests: AtomicU64,
}

/// What became of a blob that was pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    Present,
    Mounted,
    Sent,
}

/// What became of an attempt.
enum Attempt<T> {
    Done(T),
    /// It may succeed when it is made again.
    Passing(anyhow::Error, Option<Duration>),
}

impl<T> Attempt<T> {
    /// Adds what it came to.
    fn explained(self, text: impl FnOnce() -> String) -> Self {
        match self {
            Self::Passing(error, wait) => Self::Passing(error.context(text()), wait),
            done @ Self::Done(_) => done,
        }
    }
}

impl Client {
    /// `others` are repositories from which the registry is to take blobs.
    pub(crate) fn new(
        reference: &Reference,
        connection: &Connection,
        writes: bool,
        others: &[String],
        is_verbose: bool,
    ) -> Result<Self> {
        let plain_http = connection.plain_http;
        let scheme = if plain_http { "http" } else { "https" };
        let base: Uri = format!("{scheme}://{}/", reference.server())
            .parse()
            .with_context(|| format!("cannot find the registry {}", reference.host))?;
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .https_only(!plain_http)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("orrery/", env!("CARGO_PKG_VERSION")))
            .max_idle_connections(64)
            .max_idle_connections_per_host(64);
        if !plain_http {
            config = config.tls_config(tls()?);
        }
        let mut scopes = vec![format!(
            "repository:{}:{}",
            reference.repository,
            if writes { "pull,push" } else { "pull" }
        )];
        scopes.extend(others.iter().map(|other| format!("repository:{other}:pull")));
        Ok(Self {
            agent: config.build().new_agent(),
            base,
            repository: reference.repository.clone(),
            scopes,
            credentials: auth::find(connection.auth_file.as_deref(), reference)?,
            authorization: Mutex::new(None),
            may_send_passwords: !plain_http || reference.is_loopback(),
            plain_http,
            timeout: connection.timeout,
            is_verbose,
            requests: AtomicU64::new(0),
        })
    }

    /// Returns the number of requests that were made.
    pub(crate) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// Returns a manifest, its digest and its bytes.
    pub(crate) fn manifest(&self, name: &str) -> Result<(Digest, Vec<u8>)> {
        let uri = self.uri(&format!("manifests/{name}"))?;
        let wanted: Option<Digest> = name.parse().ok();
        let call = Call { accept: Some(ACCEPT), ..Call::get(0) };
        let failed = || format!("cannot fetch the manifest {name} of {}", self.repository);
        let (bytes, claimed) = retried(|| {
            let response = match self.call_once(&call, &uri)? {
                Attempt::Done(response) => response,
                Attempt::Passing(error, wait) => return Ok(Attempt::Passing(error, wait)),
            };
            let response = expect(response, &[200])?;
            let claimed = text(response.headers(), "docker-content-digest").map(str::to_owned);
            let mut bytes = Vec::new();
            let mut body =
                response.into_body().into_with_config().limit(u64::MAX).reader().take(MAX_MANIFEST + 1);
            match body.read_to_end(&mut bytes) {
                Err(error) => broken(error),
                Ok(_) => Ok(Attempt::Done((bytes, claimed))),
            }
        })
        .with_context(failed)?;
        if bytes.len() as u64 > MAX_MANIFEST {
            return Err(anyhow!("it has more than 4 MiB")).with_context(failed);
        }
        let digest = digest_of(&bytes);
        if let Some(wanted) = wanted.filter(|wanted| *wanted != digest) {
            return Err(anyhow!("the registry sent another one, {digest} instead of {wanted}"))
                .with_context(failed);
        }
        let claimed: Option<Digest> = claimed.and_then(|claimed| claimed.parse().ok());
        if let Some(claimed) = claimed.filter(|claimed| *claimed != digest) {
            return Err(anyhow!("its digest is {digest}, and the registry claims {claimed}"))
                .with_context(failed);
        }
        Ok((digest, bytes))
    }

    /// Returns the digest that the registry names for a manifest; `None` if it has none of that name.
    pub(crate) fn manifest_digest(&self, name: &str) -> Result<Option<Digest>> {
        let uri = self.uri(&format!("manifests/{name}"))?;
        let call = Call { accept: Some(ACCEPT), ..Call::method("HEAD") };
        let response = expect(self.call(&call, &uri)?, &[200, 404])
            .with_context(|| format!("cannot find the manifest {name} of {}", self.repository))?;
        Ok(text(response.headers(), "docker-content-digest").and_then(|text| text.parse().ok()))
    }

    /// Puts a manifest under a name.
    pub(crate) fn put_manifest(&self, name: &str, media_type: &str, bytes: &[u8]) -> Result<()> {
        let uri = self.uri(&format!("manifests/{name}"))?;
        let body = Source::Bytes(bytes);
        let call = Call { content_type: Some(media_type), body, ..Call::method("PUT") };
        expect(self.call(&call, &uri)?, &[200, 201])
            .with_context(|| format!("cannot push the manifest {name} of {}", self.repository))?;
        Ok(())
    }

    /// Fetches a blob. `consume` gets a reader of its bytes, once or again where the connection breaks, and what it returns is returned when
    /// the bytes were those of the digest, and as many as were announced.
    pub(crate) fn blob<T>(
        &self,
        digest: Digest,
        size: u64,
        mut consume: impl FnMut(&mut dyn Read) -> Result<T>,
    ) -> Result<T> {
        let uri = self.uri(&format!("blobs/{digest}"))?;
        let fetched = retried(|| {
            let response = match self.call_once(&Call::get(size), &uri)? {
                Attempt::Done(response) => expect(response, &[200])?,
                Attempt::Passing(error, wait) => return Ok(Attempt::Passing(error, wait)),
            };
            let announced =
                text(response.headers(), "content-length").and_then(|text| text.parse::<u64>().ok());
            if let Some(announced) = announced.filter(|announced| *announced != size) {
                bail!("the registry sends {announced} bytes of {size}");
            }
            let mut body =
                Checked::new(response.into_body().into_with_config().limit(u64::MAX).reader(), size, digest);
            let consumed = consume(&mut body);
            if consumed.is_ok() || body.left() <= MAX_DRAINED {
                // What is wrong with the bytes explains what is wrong with what they are.
                let _ = io::copy(&mut body, &mut io::sink());
            }
            match body.finish() {
                Some(Problem::Broken { error, read }) => broken(error)
                    .map(|attempt| attempt.explained(|| format!("it ended after {read} of {size} bytes"))),
                Some(Problem::Longer) => bail!("the registry sends more than its {size} bytes"),
                Some(Problem::Other(found)) => bail!("the registry sent other bytes, those of {found}"),
                Some(Problem::Unread) | None => consumed.map(Attempt::Done),
            }
        });
        fetched.with_context(|| format!("cannot fetch the blob {digest} of {}", self.repository))
    }

    /// Pushes a blob, if the registry does not have it.
    pub(crate) fn push_blob(
        &self,
        digest: Digest,
        source: Source<'_>,
        mount_from: Option<&str>,
    ) -> Result<Pushed> {
        let pushed = self.try_push_blob(digest, source, mount_from);
        pushed.with_context(|| format!("cannot push the blob {digest} to {}", self.repository))
    }

    fn try_push_blob(&self, digest: Digest, source: Source<'_>, mount_from: Option<&str>) -> Result<Pushed> {
        let head = self.uri(&format!("blobs/{digest}"))?;
        if expect(self.call(&Call::method("HEAD"), &head)?, &[200, 404])?.status() == 200 {
            return Ok(Pushed::Present);
        }
        let mut begin = "blobs/uploads/".to_owned();
        if let Some(from) = mount_from {
            begin.push_str(&format!("?mount={digest}&from={from}"));
        }
        let begin = self.uri(&begin)?;
        retried(|| {
            // An upload that broke is begun again: no other client knows of it.
            let response = expect(self.call(&Call::method("POST"), &begin)?, &[201, 202])?;
            if response.status() == 201 {
                return Ok(Attempt::Done(Pushed::Mounted));
            }
            let location =
                text(response.headers(), "location").context("the registry names no place for it")?;
            let place = join(&begin, location)?;
            self.check_scheme(&place)?;
            drop(response);
            let separator = if place.query().is_some() { '&' } else { '?' };
            let place: Uri = format!("{place}{separator}digest={digest}").parse()?;
            let content_type = Some("application/octet-stream");
            let call = Call { content_type, body: source, ..Call::method("PUT") };
            Ok(match self.call_once(&call, &place)? {
                Attempt::Done(response) => {
                    expect(response, &[201])?;
                    Attempt::Done(Pushed::Sent)
                }
                Attempt::Passing(error, wait) => Attempt::Passing(error, wait),
            })
        })
    }

    fn uri(&self, path: &str) -> Result<Uri> {
        Ok(format!("{}v2/{}/{path}", self.base, self.repository).parse()?)
    }

    /// Makes a request, again where that may help.
    fn call(&self, call: &Call<'_>, uri: &Uri) -> Result<Response<Body>> {
        retried(|| self.call_once(call, uri))
    }

    /// Makes a request with the authorization that the registry asks for.
    fn call_once(&self, call: &Call<'_>, uri: &Uri) -> Result<Attempt<Response<Body>>> {
        let mut authorization = self.current();
        // Another thread's new token is tried before one is asked for.
        for is_last in [false, false, true] {
            let (response, is_ours) = match self.follow(call, uri, authorization.as_deref()) {
                Ok(found) => found,
                Err(error) => return passing_or(error),
            };
            let status = response.status().as_u16();
            if status != 401 || !is_ours {
                return Ok(match status {
                    429 | 500 | 502 | 503 | 504 => {
                        let wait = text(response.headers(), "retry-after").and_then(|text| text.parse().ok());
                        let error = refusal(response);
                        Attempt::Passing(error, wait.map(Duration::from_secs))
                    }
                    _ => Attempt::Done(response),
                });
            }
            if is_last {
                return Err(refusal(response));
            }
            let current = self.current();
            if current != authorization {
                authorization = current;
                continue;
            }
            if authorization.is_some()
                && self.credentials.as_ref().is_some_and(|own| own.basic() == authorization)
            {
                return Err(refusal(response)).context("the registry refuses the password");
            }
            let values = response.headers().get_all(header::WWW_AUTHENTICATE).iter();
            let challenge = Challenge::parse(values.filter_map(|value| value.to_str().ok()));
            let challenge = match challenge {
                Some(challenge) => challenge,
                None => return Err(refusal(response)),
            };
            drop(response);
            let renewed = self.authorize(challenge)?;
            *self.authorization.lock().unwrap_or_else(PoisonError::into_inner) = Some(renewed.clone());
            authorization = Some(renewed);
        }
        bail!("the registry asks for a password again and again")
    }

    fn current(&self) -> Option<String> {
        self.authorization.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the value of the header that answers a challenge.
    fn authorize(&self, challenge: Challenge) -> Result<String> {
        let credentials = self.credentials.as_ref();
        if credentials.is_some() && !self.may_send_passwords {
            bail!("the registry asks for a password, which is not sent without TLS; leave --plain-http out");
        }
        let (realm, service) = match challenge {
            Challenge::Basic => {
                let basic = credentials.and_then(Credentials::basic);
                return basic.context(
                    "the registry asks for a password, and there is none for it; log in with `podman login` or `docker login`",
                );
            }
            Challenge::Bearer { realm, service } => (realm, service),
        };
        let failed = || format!("cannot get a token from {}", printable(&realm));
        let mut parameters: Vec<(&str, &str)> =
            self.scopes.iter().map(|scope| ("scope", scope.as_str())).collect();
        parameters.extend(service.as_deref().map(|service| ("service", service)));
        let response = match credentials {
            Some(Credentials::Identity(token)) => {
                parameters.extend([
                    ("grant_type", "refresh_token"),
                    ("client_id", "orrery"),
                    ("refresh_token", token),
                ]);
                let form = encoded(&parameters);
                let content_type = Some("application/x-www-form-urlencoded");
                let body = Source::Bytes(form.as_bytes());
                let call = Call { content_type, body, ..Call::method("POST") };
                self.ask_for_token(&call, &realm, None)
            }
            other => {
                let separator = if realm.contains('?') { '&' } else { '?' };
                let uri = format!("{realm}{separator}{}", encoded(&parameters));
                let basic = other.and_then(Credentials::basic);
                self.ask_for_token(&Call::get(0), &uri, basic.as_deref())
            }
        };
        let token = response.with_context(failed)?;
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(anyhow!("it sent no token")).with_context(failed);
        }
        Ok(format!("Bearer {token}"))
    }

    fn ask_for_token(&self, call: &Call<'_>, uri: &str, authorization: Option<&str>) -> Result<String> {
        #[derive(serde::Deserialize)]
        struct Token {
            token: Option<String>,
            access_token: Option<String>,
        }
        let uri: Uri = uri.parse().context("it is no address")?;
        self.check_scheme(&uri)?;
        let is_loopback = uri.host().is_some_and(|host| matches!(host, "localhost" | "127.0.0.1" | "[::1]"));
        if uri.scheme_str() != Some("https") && !is_loopback && self.credentials.is_some() {
            bail!("it would get the password without TLS");
        }
        let bytes = retried(|| {
            // A redirection would take the password with it: there is none.
            let response = match self.exchange(call, &uri, authorization) {
                Ok(response) => response,
                Err(error) => return passing_or(error),
            };
            let response = match response.status().as_u16() {
                429 | 500 | 502 | 503 | 504 => return Ok(Attempt::Passing(refusal(response), None)),
                _ => expect(response, &[200])?,
            };
            let mut bytes = Vec::new();
            match response.into_body().into_reader().take(MAX_TEXT).read_to_end(&mut bytes) {
                Ok(_) => Ok(Attempt::Done(bytes)),
                Err(error) => broken(error),
            }
        })?;
        let token: Token = serde_json::from_slice(&bytes).ok().context("it sent no token")?;
        Ok(token.token.or(token.access_token).unwrap_or_default())
    }

    /// Follows redirections of requests that read. Only the registry's own host gets the authorization. Returns also whether it was that
    /// host which answered.
    fn follow(
        &self,
        call: &Call<'_>,
        uri: &Uri,
        authorization: Option<&str>,
    ) -> Result<(Response<Body>, bool), CallError> {
        let mut uri = uri.clone();
        for _ in 0..=MAX_REDIRECTS {
            let is_ours = origin(&uri) == origin(&self.base);
            let response = self.exchange(call, &uri, authorization.filter(|_| is_ours))?;
            let is_redirection = matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308);
            if !is_redirection {
                return Ok((response, is_ours));
            }
            if !call.is_read() {
                return Err(anyhow!("the registry redirects what was to be sent").into());
            }
            let location = text(response.headers(), "location").context("a redirection leads nowhere")?;
            uri = join(&uri, location)?;
            self.check_scheme(&uri)?;
        }
        Err(anyhow!("the registry redirects more than {MAX_REDIRECTS} times").into())
    }

    fn check_scheme(&self, uri: &Uri) -> Result<()> {
        match uri.scheme_str() {
            Some("https") => Ok(()),
            Some("http") if self.plain_http => Ok(()),
            _ => bail!("the registry leads to {}, which is no https address", shown(uri)),
        }
    }

    /// Makes one request.
    fn exchange(
        &self,
        call: &Call<'_>,
        uri: &Uri,
        authorization: Option<&str>,
    ) -> Result<Response<Body>, CallError> {
        let mut request = Request::builder().method(call.method).uri(uri);
        for (name, value) in
            [("accept", call.accept), ("content-type", call.content_type), ("authorization", authorization)]
        {
            request = request.header_if(name, value);
        }
        if !call.is_read() {
            request = request.header("content-length", call.body.length());
        }
        self.requests.fetch_add(1, Ordering::Relaxed);
        let mut file;
        let answered = match call.body {
            Source::Nothing if call.is_read() => self.run(call, request.body(())?),
            Source::Nothing => self.run(call, request.body(&[][..])?),
            Source::Bytes(bytes) => self.run(call, request.body(bytes)?),
            Source::File(path, length) => {
                let failed = || format!("cannot read {}", path.display());
                file = Sized { file: File::open(path).with_context(failed)?, left: length };
                self.run(call, request.body(SendBody::from_reader(&mut file))?)
            }
        };
        if self.is_verbose {
            let outcome: &dyn Display = match &answered {
                Ok(response) => &response.status(),
                Err(error) => error,
            };
            eprintln!("orrery-orc-registry: {} {}: {outcome}", call.method, shown(uri));
        }
        answered.map_err(CallError::Http)
    }

    fn run<S: AsSendBody>(
        &self,
        call: &Call<'_>,
        request: Request<S>,
    ) -> Result<Response<Body>, ureq::Error> {
        let bytes = call.body.length() + call.expected;
        let slowest = Duration::from_secs(bytes / SLOWEST);
        // Before it answers, a registry looks through all that was sent.
        let silence = self.timeout + Duration::from_secs(call.body.length() >> 25);
        let request = self.agent.configure_request(request);
        let request = request
            .timeout_global(Some(self.timeout * 2 + slowest))
            .timeout_resolve(Some(self.timeout))
            .timeout_connect(Some(self.timeout))
            .timeout_per_read(Some(silence))
            .timeout_per_write(Some(self.timeout))
            .build();
        self.agent.run(request)
    }
}

/// A file whose first bytes are sent: it fails where it has fewer by now.
struct Sized {
    file: File,
    left: u64,
}

impl Read for Sized {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let take = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let count = self.file.read(&mut buffer[..take])?;
        if count == 0 && take > 0 {
            return Err(io::Error::other("the file became shorter while it was pushed"));
        }
        self.left -= count as u64;
        Ok(count)
    }
}

/// A request without an answer.
enum CallError {
    Http(ureq::Error),
    Other(anyhow::Error),
}

impl From<anyhow::Error> for CallError {
    fn from(error: anyhow::Error) -> Self {
        Self::Other(error)
    }
}

impl From<ureq::http::Error> for CallError {
    fn from(error: ureq::http::Error) -> Self {
        Self::Other(error.into())
    }
}

/// Whether a request without an answer is to be made again, or what its error is.
fn passing_or<T>(error: CallError) -> Result<Attempt<T>> {
    let error = match error {
        CallError::Other(error) => return Err(error),
        CallError::Http(error) => error,
    };
    match &error {
        ureq::Error::Io(cause) if is_tls(cause) || cause.kind() == io::ErrorKind::ConnectionRefused => {
            Err(anyhow!("cannot connect: {cause}"))
        }
        ureq::Error::Io(cause) if cause.kind() != io::ErrorKind::TimedOut => {
            Ok(Attempt::Passing(anyhow!("the connection broke: {cause}"), None))
        }
        ureq::Error::ConnectionFailed => Ok(Attempt::Passing(anyhow!("cannot connect"), None)),
        ureq::Error::Timeout(_) | ureq::Error::Io(_) => {
            Err(anyhow!("the registry is too slow: {error}; see --timeout"))
        }
        _ => Err(anyhow!("{error}")),
    }
}

/// Whether a request whose answer broke is to be made again, or what its error is.
fn broken<T>(error: io::Error) -> Result<Attempt<T>> {
    match ureq::Error::from(error) {
        error @ ureq::Error::Timeout(_) => Err(anyhow!("the registry is too slow: {error}; see --timeout")),
        ureq::Error::Io(error) => Ok(Attempt::Passing(error.into(), None)),
        other => Ok(Attempt::Passing(anyhow!("{other}"), None)),
    }
}

fn is_tls(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>())
        || matches!(error.kind(), io::ErrorKind::InvalidData)
}

/// Makes attempts until one is done, with a pause before each further one.
fn retried<T>(mut attempt: impl FnMut() -> Result<Attempt<T>>) -> Result<T> {
    let mut count = 0;
    loop {
        let (error, wait) = match attempt()? {
            Attempt::Done(done) => return Ok(done),
            Attempt::Passing(error, wait) => (error, wait),
        };
        if count == MAX_RETRIES {
            return Err(error).with_context(|| format!("it failed {} times", count + 1));
        }
        let pause = Duration::from_millis(250) * 2_u32.pow(count);
        std::thread::sleep(wait.unwrap_or(pause).min(MAX_WAIT));
        count += 1;
    }
}

/// Returns an answer of one of these statuses.
fn expect(response: Response<Body>, statuses: &[u16]) -> Result<Response<Body>> {
    match statuses.contains(&response.status().as_u16()) {
        true => Ok(response),
        false => Err(refusal(response)),
    }
}

/// Returns the error that a registry sent.
fn refusal(response: Response<Body>) -> anyhow::Error {
    #[derive(serde::Deserialize)]
    struct Errors {
        errors: Vec<HashMap<String, serde_json::Value>>,
    }
    let status = response.status();
    let mut bytes = Vec::new();
    let _ = response.into_body().into_reader().take(64 << 10).read_to_end(&mut bytes);
    let errors = serde_json::from_slice(&bytes).unwrap_or(Errors { errors: Vec::new() });
    let field = |name: &str| errors.errors.first()?.get(name)?.as_str().map(printable);
    match (field("code"), field("message")) {
        (Some(code), Some(message)) => anyhow!("the registry answers {status}: {code}: {message}"),
        _ => anyhow!("the registry answers {status}"),
    }
}

/// Returns a text that a terminal can print, in part if it is long.
fn printable(text: &str) -> String {
    text.chars().filter(|one| !one.is_control()).take(200).collect()
}

/// Returns an address without what may be secret in it.
fn shown(uri: &Uri) -> String {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    printable(&format!("{}://{host}{}", uri.scheme_str().unwrap_or("?"), uri.path()))
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// Returns what has to be equal for two addresses to be of one server.
fn origin(uri: &Uri) -> (Option<&str>, Option<String>, u16) {
    let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("http") { 80 } else { 443 });
    (uri.scheme_str(), uri.host().map(str::to_ascii_lowercase), port)
}

/// Returns the address that another one leads to.
fn join(from: &Uri, location: &str) -> Result<Uri> {
    let bad = || format!("the registry leads to {:?}, which is no address", printable(location));
    let whole = if location.starts_with('/') && !location.starts_with("//") {
        let authority = from.authority().with_context(bad)?;
        format!("{}://{authority}{location}", from.scheme_str().unwrap_or("https"))
    } else {
        location.to_owned()
    };
    let uri: Uri = whole.parse().with_context(bad)?;
    match uri.scheme().is_some() && uri.host().is_some() {
        true => Ok(uri),
        false => Err(anyhow!(bad())),
    }
}

/// Encodes the parameters of a form (WHATWG URL, application/x-www-form-urlencoded).
fn encoded(parameters: &[(&str, &str)]) -> String {
    let encode = |text: &str| -> String {
        let mut encoded = String::new();
        for byte in text.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b':' | b'/' | b',' => {
                    encoded.push(char::from(byte));
                }
                _ => encoded.push_str(&format!("%{byte:02X}")),
            }
        }
        encoded
    };
    let pairs = parameters.iter().map(|(name, value)| format!("{name}={}", encode(value)));
    pairs.collect::<Vec<_>>().join("&")
}

/// Returns the settings of TLS: the certificates that this machine trusts (or those of `$SSL_CERT_FILE`).
fn tls() -> Result<TlsConfig> {
    let found = rustls_native_certs::load_native_certs();
    let roots: Vec<Certificate<'static>> =
        found.certs.iter().map(|one| Certificate::from_der(one).to_owned()).collect();
    if roots.is_empty() {
        let cause = found.errors.first().map(ToString::to_string).unwrap_or_default();
        bail!("cannot find certificates to trust: {cause}; install ca-certificates, or set SSL_CERT_FILE");
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    Ok(TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .root_certs(RootCerts::new_with_certs(&roots))
        .unversioned_rustls_crypto_provider(provider)
        .build())
}

/// A header that is there in some requests only.
trait HeaderIf {
    fn header_if(self, name: &str, value: Option<&str>) -> Self;
}

impl HeaderIf for ureq::http::request::Builder {
    fn header_if(self, name: &str, value: Option<&str>) -> Self {
        match value {
            Some(value) => self.header(name, value),
            None => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lead_where_they_say() {
        let from: Uri = "https://reg.example:5000/v2/x?y".parse().unwrap();
        let join = |location: &str| join(&from, location).map(|uri| uri.to_string()).ok();
        assert_eq!(join("/v2/z?a=b").as_deref(), Some("https://reg.example:5000/v2/z?a=b"));
        assert_eq!(join("http://other.example/q").as_deref(), Some("http://other.example/q"));
        for bad in ["", "x", "//other.example/x", "file:///etc/passwd", "http://", "/a b"] {
            assert_eq!(join(bad), None, "{bad}");
        }
        let origin_of = |text: &str| {
            let uri: Uri = text.parse().unwrap();
            let (scheme, host, port) = origin(&uri);
            (scheme.map(str::to_owned), host, port)
        };
        assert_eq!(origin_of("https://A.example/x"), origin_of("https://a.example:443/y"));
        assert_ne!(origin_of("https://a.example/x"), origin_of("http://a.example:443/x"));
        assert_ne!(origin_of("https://a.example/x"), origin_of("https://a.example:5000/x"));
        let secret: Uri = "https://user:pass@a.example/x?signature=1".parse().unwrap();
        assert_eq!(shown(&secret), "https://a.example/x");
    }

    #[test]
    fn forms_are_encoded() {
        assert_eq!(
            encoded(&[("scope", "repository:a/b:pull,push"), ("service", "a b&c=d")]),
            "scope=repository:a/b:pull,push&service=a%20b%26c%3Dd"
        );
    }
}
