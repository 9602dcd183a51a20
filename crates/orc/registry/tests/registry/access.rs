//! Who a registry is, and who asks it: certificates, passwords and tokens.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Arc, OnceLock};

use base64::Engine as _;

use crate::fake::{Fake, Served, ok, status};
use crate::server::Server;
use crate::{Machine, failed, succeeded};

/// What no output and no other host may see.
const PASSWORD: &str = "open sesame";

/// Its hash by bcrypt.
const HASH: &str = "$2b$04$pziVyVg616IN/.n2aRLZAOIB/5M.XqdcYtz08r9aangMytO1CCnL.";

/// A tree to push.
fn plant(machine: &Machine) -> PathBuf {
    let tree = machine.path("tree");
    fs::create_dir_all(&tree).unwrap();
    fs::write(tree.join("file"), "bytes").unwrap();
    tree
}

fn basic(password: &str) -> String {
    base64::engine::general_purpose::STANDARD.encode(format!("ali:{password}"))
}

/// Writes a file of passwords for a registry.
fn log_in(machine: &Machine, host: &str, password: &str) -> PathBuf {
    let file = machine.path("auth.json");
    fs::write(&file, format!(r#"{{"auths":{{"{host}":{{"auth":"{}"}}}}}}"#, basic(password))).unwrap();
    file
}

fn no_secret(output: &Output) {
    let all = [&output.stdout[..], &output.stderr].concat();
    let all = String::from_utf8_lossy(&all);
    assert!(!all.contains("sesame") && !all.contains(&basic(PASSWORD)[..16]), "{all}");
}

#[test]
fn certificates_are_verified() {
    let machine = Machine::new();
    let (key, certificate) = (machine.path("key"), machine.path("certificate"));
    let words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test \
                 -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE";
    let made = Command::new("openssl")
        .args(words.split_whitespace())
        .arg("-keyout")
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let http = format!("  tls:\n    certificate: {}\n    key: {}\n", certificate.display(), key.display());
    let Some(server) = Server::with(&http, "") else { return };
    let tree = plant(&machine);
    let push = |options: &[&str], roots: Option<&PathBuf>| {
        let mut command = machine.command(&["push"]);
        command.args(options).arg(&tree).arg(server.reference("x"));
        command.envs(roots.map(|roots| ("SSL_CERT_FILE", roots))).output().unwrap()
    };
    let error = failed(&push(&[], None));
    assert!(error.contains("certificate"), "{error}");
    let error = failed(&push(&["--plain-http"], None));
    assert!(error.contains("400"), "{error}");
    assert!(server.requests().iter().all(|request| !request.contains("/blobs/")));
    succeeded(&push(&[], Some(&certificate)));
    // Of a host that is another one than in the certificate.
    let Some(other) = Server::with(&http, "") else { return };
    let mut command = machine.command(&["push"]);
    let reference = format!("localhost:{}/x", other.port);
    let error =
        failed(&command.arg(&tree).arg(reference).env("SSL_CERT_FILE", &certificate).output().unwrap());
    assert!(error.contains("certificate"), "{error}");
}

/// TLS is spoken unless the user says otherwise, also with this machine.
#[test]
fn plain_http_has_to_be_asked_for() {
    let machine = Machine::new();
    let fake = Served::tree(&[]).serve();
    let mut command = machine.command(&["push", "--timeout", "1s"]);
    let error = failed(&command.arg(plant(&machine)).arg(fake.reference("x")).output().unwrap());
    assert!(error.contains("cannot push"), "{error}");
    assert!(fake.lines().is_empty());
}

#[test]
fn passwords_are_those_of_the_file() {
    let machine = Machine::new();
    let users = machine.path("users");
    fs::write(&users, format!("ali:{HASH}\n")).unwrap();
    let auth = format!("auth:\n  htpasswd:\n    realm: test\n    path: {}\n", users.display());
    let Some(server) = Server::with("", &auth) else { return };
    let tree = plant(&machine);
    let host = format!("127.0.0.1:{}", server.port);
    let push = |password: Option<&str>| {
        let mut command = machine.command(&["--log-level", "debug", "push", "--plain-http"]);
        command.arg(&tree).arg(server.reference("x"));
        command.envs(password.map(|password| ("REGISTRY_AUTH_FILE", log_in(&machine, &host, password))));
        let output = command.output().unwrap();
        no_secret(&output);
        output
    };
    let error = failed(&push(None));
    assert!(error.contains("there is none for it; log in with `podman login`"), "{error}");
    let before = server.requests().len();
    let error = failed(&push(Some("wrong sesame")));
    assert!(error.contains("the registry refuses the password"), "{error}");
    // Accounts are locked after some attempts.
    assert!(server.requests().len() - before <= 2, "{:?}", server.requests());
    succeeded(&push(Some(PASSWORD)));
    // As Docker keeps them.
    let home = machine.home.path().join(".docker");
    fs::create_dir(&home).unwrap();
    fs::copy(machine.path("auth.json"), home.join("config.json")).unwrap();
    succeeded(&machine.push(&tree, &server.reference("y"), &[]));
    let error = failed(&machine.push(&tree, &server.reference("y"), &["--auth-file", "/nonexistent"]));
    assert!(error.contains("cannot read the passwords in /nonexistent"), "{error}");
}

/// A program of Docker's may have the passwords.
#[test]
fn a_helper_is_asked_for_passwords() {
    let machine = Machine::new();
    let helper = machine.path("docker-credential-test");
    let script = format!(
        "#!/bin/sh\nread -r host\n[ \"$1 $host\" = \"get $HOST\" ] || exit 1\nprintf '{{\"Username\":\"ali\",\"Secret\":\"{PASSWORD}\"}}'\n"
    );
    orrery_testing::write_program(&helper, &script);
    let served = Served::tree(&[]);
    let fake = Fake::new(move |request| match request.header("authorization") {
        None => status(401, "www-authenticate: Basic realm=\"x\"\r\n", b""),
        Some(_) => served.answer(request),
    });
    let host = format!("127.0.0.1:{}", fake.port);
    let file = machine.path("auth.json");
    fs::write(&file, format!(r#"{{"credHelpers":{{"{host}":"test"}}}}"#)).unwrap();
    let mut command = machine.command(&["push", "--plain-http", "--auth-file"]);
    command.arg(&file).arg(plant(&machine)).arg(fake.reference("x"));
    let path = format!("{}:/usr/bin:/bin", machine.path("").display());
    // It cannot push there, but it asks with the password.
    no_secret(&command.env("PATH", path).env("HOST", &host).output().unwrap());
    let wanted = format!("Basic {}", basic(PASSWORD));
    assert!(fake.requests().iter().any(|request| request.header("authorization") == Some(&wanted)));
}

/// A registry with tokens: `token` answers for them.
fn with_tokens(served: Served) -> Fake {
    let own: Arc<OnceLock<u16>> = Arc::default();
    let port = Arc::clone(&own);
    let fake = Fake::new(move |request| {
        if request.line.starts_with("GET /token") {
            return ok(br#"{"token":"t0ken","expires_in":60}"#);
        }
        if request.header("authorization") == Some("Bearer t0ken") {
            return served.answer(request);
        }
        let port = own.get().unwrap();
        let challenge = format!(
            "www-authenticate: Bearer realm=\"http://127.0.0.1:{port}/token?a=b\",service=\"test\",scope=\"x\"\r\n"
        );
        status(401, &challenge, b"")
    });
    port.set(fake.port).unwrap();
    fake
}

#[test]
fn passwords_are_exchanged_for_tokens() {
    let Some(machine) = Machine::with_store() else { return };
    let fake = with_tokens(Served::tree(&[("a", b"a"), ("b", b"b")]));
    // Without a password, as anybody.
    succeeded(&machine.pull(&fake.reference("x"), "anybody", &["--jobs", "1"]));
    let lines = fake.lines();
    assert_eq!(lines[1], "GET /token?a=b&scope=repository:x:pull&service=test");
    assert_eq!(lines.iter().filter(|line| line.contains("/token")).count(), 1);
    assert!(fake.requests().iter().all(|request| !request.head.contains("Basic")));
    // With one, which the place of the tokens gets alone.
    let file = log_in(&machine, &format!("127.0.0.1:{}", fake.port), PASSWORD);
    let output = machine.pull(&fake.reference("x"), "ali", &["--auth-file", file.to_str().unwrap()]);
    no_secret(&output);
    succeeded(&output);
    let with_password = fake.requests().into_iter().filter(|request| request.head.contains("Basic"));
    assert!(with_password.map(|request| request.line).all(|line| line.starts_with("GET /token")));
}

#[test]
fn a_registry_that_asks_again_and_again_is_left() {
    let machine = Machine::new();
    let tree = plant(&machine);
    for challenge in [
        "",
        "www-authenticate: Basic realm=x\r\n",
        "www-authenticate: Bearer realm=\"",
        "www-authenticate: Negotiate\r\n",
    ] {
        let own: Arc<OnceLock<u16>> = Arc::default();
        let port = Arc::clone(&own);
        let fake = Fake::new(move |request| {
            if request.line.contains("/token") {
                return ok(br#"{"access_token":"t"}"#);
            }
            let rest = if challenge.ends_with('"') {
                format!("http://127.0.0.1:{}/token\"\r\n", own.get().unwrap())
            } else {
                String::new()
            };
            status(401, &format!("{challenge}{rest}"), b"")
        });
        port.set(fake.port).unwrap();
        let file = log_in(&machine, &format!("127.0.0.1:{}", fake.port), PASSWORD);
        let output = machine.push(&tree, &fake.reference("x"), &["--auth-file", file.to_str().unwrap()]);
        no_secret(&output);
        let error = failed(&output);
        assert!(error.contains("401") || error.contains("again and again"), "{error}");
        assert!(fake.lines().len() <= 5, "{challenge}: {:?}", fake.lines());
    }
}

/// Another host, to which the registry sends its clients, learns nothing.
#[test]
fn passwords_stay_with_the_registry() {
    let Some(machine) = Machine::with_store() else { return };
    let files: [(&str, &[u8]); 2] = [("a", b"a"), ("b", b"b")];
    let elsewhere = Served::tree(&files).serve();
    let port = elsewhere.port;
    let served = Served::tree(&files);
    let fake = Fake::new(move |request| {
        if request.header("authorization").is_none() {
            return status(401, "www-authenticate: Basic realm=\"x\"\r\n", b"");
        }
        if request.line.contains("/blobs/") {
            let path = request.line.split(' ').nth(1).unwrap();
            return status(307, &format!("location: http://127.0.0.1:{port}{path}\r\n"), b"");
        }
        served.answer(request)
    });
    let file = log_in(&machine, &format!("127.0.0.1:{}", fake.port), PASSWORD);
    succeeded(&machine.pull(&fake.reference("x"), "tree", &["--auth-file", file.to_str().unwrap()]));
    assert_eq!(elsewhere.lines().len(), 3);
    assert!(elsewhere.requests().iter().all(|request| request.header("authorization").is_none()));
    assert!(fake.requests().iter().any(|request| request.header("authorization").is_some()));
    // Nor does a host that asks for a password itself.
    let asks = Fake::new(|_| status(401, "www-authenticate: Basic realm=\"x\"\r\n", b""));
    let port = asks.port;
    let leads = Fake::new(move |_| status(307, &format!("location: http://127.0.0.1:{port}/x\r\n"), b""));
    let file = log_in(&machine, &format!("127.0.0.1:{}", leads.port), PASSWORD);
    let error =
        failed(&machine.pull(&leads.reference("x"), "other", &["--auth-file", file.to_str().unwrap()]));
    assert!(error.contains("401"), "{error}");
    assert!(asks.requests().iter().all(|request| request.header("authorization").is_none()));
}
