//! OpenSSL's older interface, the ENGINE: its programs, and curl, with references to keys in a vault.

use std::fs;
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use super::house::{House, Kind, await_that, free_port, tools};

/// Returns a program that finds the engine, and no provider.
fn command(house: &House, program: &str) -> Command {
    let mut command = house.command(program, false);
    command.env("OPENSSL_ENGINES", tools().join("engines"));
    command
}

/// Returns a configuration with the engine in it, and its policy.
fn allow(house: &House, policy: &str) -> String {
    let path = house.path("engine.cnf");
    let module = tools().join("engines/orrery.so");
    let text = format!(
        "openssl_conf = start\n[start]\nengines = engines\n[engines]\norrery = orrery_engine\n[orrery_engine]\n\
         engine_id = orrery\ndynamic_path = {}\nALLOW = {policy}\n",
        module.display()
    );
    fs::write(&path, text).unwrap();
    path
}

/// `openssl` with the engine; what it prints, and whether it succeeded.
fn openssl(house: &House, arguments: &[&str]) -> (bool, String) {
    openssl_as(house, None, arguments)
}

fn openssl_as(house: &House, configuration: Option<&str>, arguments: &[&str]) -> (bool, String) {
    let mut command = command(house, "openssl");
    if let Some(configuration) = configuration {
        command.env("OPENSSL_CONF", configuration);
    }
    let [first, rest @ ..] = arguments else { panic!("no command") };
    let output =
        command.arg(first).args(["-engine", "orrery"]).args(rest).stdin(Stdio::null()).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        self.0.wait().unwrap();
    }
}

#[test]
fn older_programs_sign_and_decrypt_through_the_engine() {
    let Some(house) = House::new() else { return };
    let (data, signature, cipher) = (house.path("data"), house.path("signature"), house.path("cipher"));
    fs::write(&data, "some data").unwrap();
    let pss = ["-sigopt", "rsa_padding_mode:pss", "-sigopt", "rsa_pss_saltlen:digest"];
    for (kind, options) in [(Kind::Rsa, &[][..]), (Kind::Rsa, &pss), (Kind::P256, &[]), (Kind::P384, &[])] {
        let key = house.key(kind);
        let sign = ["-keyform", "engine", "-sign", &key.reference, "-out", &signature, &data];
        let (good, text) = openssl(&house, &[&["dgst", "-sha256"], options, &sign].concat());
        assert!(good, "{kind:?}: {text}");
        let verify = ["-prverify", &key.private, "-signature", &signature, &data];
        house.plain_openssl(&[&["dgst", "-sha256"], options, &verify].concat());
    }
    let key = house.key(Kind::Rsa);
    // OpenSSL takes the padding of OAEP off by itself here.
    for (mode, policy) in [("rsa_padding_mode:pkcs1", "decrypt"), ("rsa_padding_mode:oaep", "decrypt, raw")] {
        let encrypt = ["pkeyutl", "-encrypt", "-inkey", &key.private, "-in", &data, "-out", &cipher];
        house.plain_openssl(&[&encrypt[..], &["-pkeyopt", mode]].concat());
        let decrypt = ["pkeyutl", "-keyform", "engine", "-decrypt", "-inkey", &key.reference, "-in", &cipher];
        let arguments = [&decrypt[..], &["-pkeyopt", mode]].concat();
        let (good, text) = openssl(&house, &arguments);
        assert!(!good && text.contains("ALLOW:decrypt"), "{mode}: {text}");
        let (good, text) = openssl_as(&house, Some(&allow(&house, policy)), &arguments);
        assert!(good && text.contains("some data"), "{mode}: {text}");
    }
    // SHA-1 is refused, whichever way it is padded; and it is allowed by name.
    for options in [&[][..], &pss] {
        let sign = ["-keyform", "engine", "-sign", &key.reference, "-out", &signature, &data];
        let arguments = [&["dgst", "-sha1"], options, &sign].concat();
        let (good, text) = openssl(&house, &arguments);
        assert!(!good && text.contains("ALLOW:"), "{options:?}: {text}");
        let (good, text) = openssl_as(&house, Some(&allow(&house, "any-digest, raw")), &arguments);
        assert!(good, "{options:?}: {text}");
    }
    // What it cannot do it says.
    let read = |file: &str| openssl(&house, &["pkey", "-inform", "engine", "-in", file, "-pubout"]);
    for (file, reason) in [
        (&house.key(Kind::Ed25519).reference, "keys of type RSA and EC only"),
        (&key.private, "is not a reference to a key in a vault"),
        (&house.path("nothing"), "cannot open"),
    ] {
        let (good, text) = read(file);
        assert!(!good && text.contains(reason), "{file}: {text}");
    }
}

#[test]
fn both_sides_of_a_connection_use_the_engine() {
    let Some(house) = House::new() else { return };
    for kind in [Kind::Rsa, Kind::P256] {
        let (key, port) = (house.key(kind), free_port().to_string());
        let address = format!("127.0.0.1:{port}");
        let mut server = command(&house, "openssl");
        server.args(["s_server", "-engine", "orrery", "-keyform", "engine", "-key", &key.reference]);
        server.args(["-cert", &key.certificate, "-accept", &address, "-www", "-quiet"]);
        server.args(["-Verify", "1", "-verify_return_error", "-CAfile", &key.certificate]);
        let output = (Stdio::null(), Stdio::null(), Stdio::null());
        let server = server.stdin(output.0).stdout(output.1).stderr(output.2).spawn().unwrap();
        let _server = Server(server);
        await_that("s_server listens", || TcpStream::connect(&address).is_ok());
        let mut curl = command(&house, "curl");
        curl.args(["-sS", "--max-time", "20", "--cacert", &key.certificate, "--engine", "orrery"]);
        curl.args(["--key-type", "ENG", "--key", &key.reference, "--cert", &key.certificate]);
        curl.args(["--connect-to", &format!("localhost:{port}:{address}")]);
        let output = curl.arg(format!("https://localhost:{port}/")).output().unwrap();
        let page = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && page.contains("Cipher"), "{kind:?}: {output:?}");
        assert!(page.contains("Client certificate"), "{page}");
    }
}
