//! Private keys in a vault, end to end: `orrery vault`, the OpenSSL provider, and the distribution's nginx, curl and openssl.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "vault/engine.rs"]
mod engine;
#[path = "vault/house.rs"]
mod house;
#[path = "vault/policy.rs"]
mod policy;
#[path = "vault/signatures.rs"]
mod signatures;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use house::{Apache, House, KEYS, Kind, Nginx, await_that, kill, secrets_of};

#[test]
fn openssl_signs_and_decrypts_with_references() {
    let Some(house) = House::new() else { return };
    house.configure("allow = decrypt, any-digest");
    signs_and_decrypts(&house);
    house.configure("signer = openssl");
    signs_and_decrypts(&house);
}

fn signs_and_decrypts(house: &House) {
    fs::write(house.path("data"), "some data").unwrap();
    let data = house.path("data");
    for kind in KEYS {
        let key = house.key(kind);
        // The same public key; a certificate signed by itself, which plain OpenSSL accepts.
        let ours = house.openssl(&["pkey", "-in", &key.reference, "-pubout"]);
        assert_eq!(ours, house.plain_openssl(&["pkey", "-in", &key.private, "-pubout"]), "{kind:?}");
        let signed = house.path("signed.crt");
        house.openssl(&["req", "-x509", "-new", "-key", &key.reference, "-subj", "/CN=a", "-out", &signed]);
        house.plain_openssl(&["verify", "-CAfile", &signed, &signed]);
        // The private part is not to be had.
        let mut export = house.command("openssl", true);
        export.args(["pkey", "-in", &key.reference]);
        let output = export.output().unwrap();
        assert!(
            !output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("PRIVATE"),
            "{output:?}"
        );
    }
    let key = house.key(Kind::Rsa);
    let signature = house.path("signature");
    for padding in ["pkcs1", "pss"] {
        for digest in ["-sha1", "-sha256", "-sha384", "-sha512"] {
            let mode = format!("rsa_padding_mode:{padding}");
            house.openssl(&[
                "dgst",
                digest,
                "-sign",
                &key.reference,
                "-sigopt",
                &mode,
                "-out",
                &signature,
                &data,
            ]);
            let verify = ["dgst", digest, "-sigopt", &mode, "-signature", &signature];
            house.plain_openssl(&[&verify[..], &["-prverify", &key.private, &data]].concat());
            house.openssl(&[&verify[..], &["-prverify", &key.reference, &data]].concat());
        }
    }
    let cipher = house.path("cipher");
    for mode in ["pkcs1", "oaep"] {
        let mode = format!("rsa_padding_mode:{mode}");
        house.plain_openssl(&[
            "pkeyutl",
            "-encrypt",
            "-inkey",
            &key.private,
            "-in",
            &data,
            "-out",
            &cipher,
            "-pkeyopt",
            &mode,
        ]);
        let back = house.openssl(&[
            "pkeyutl",
            "-decrypt",
            "-inkey",
            &key.reference,
            "-in",
            &cipher,
            "-pkeyopt",
            &mode,
        ]);
        assert_eq!(back, "some data");
    }
    // Everything else goes on as ever.
    house.openssl(&["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"]);
    house.openssl(&["dgst", "-sha256", "-sign", &key.private, "-out", &signature, &data]);
}

#[test]
fn nginx_serves_every_kind_of_key_in_every_way() {
    let Some(house) = House::new() else { return };
    // For TLS 1.2 without forward secrecy.
    house.configure("allow = decrypt");
    let Some(nginx) = Nginx::start(&house, &KEYS, true, "") else { return };
    for (kind, options, expected) in [
        (Kind::Rsa, "-tls1_3 -sigalgs rsa_pss_rsae_sha256", "RSA-PSS"),
        (Kind::Rsa, "-tls1_3 -sigalgs rsa_pss_rsae_sha384", "RSA-PSS"),
        (Kind::Rsa, "-tls1_3 -sigalgs rsa_pss_rsae_sha512", "RSA-PSS"),
        (Kind::Rsa, "-tls1_2 -cipher ECDHE-RSA-AES128-GCM-SHA256 -sigalgs RSA+SHA256", "RSA"),
        (Kind::Rsa, "-tls1_2 -cipher ECDHE-RSA-AES128-GCM-SHA256 -sigalgs RSA+SHA512", "RSA"),
        (Kind::Rsa, "-tls1_2 -cipher ECDHE-RSA-AES128-GCM-SHA256 -sigalgs RSA-PSS+SHA256", "RSA-PSS"),
        (Kind::Rsa, "-tls1_2 -cipher AES128-GCM-SHA256", ""),
        (Kind::Rsa, "-tls1_2 -cipher AES256-SHA", ""),
        (Kind::RsaPss, "-tls1_3 -sigalgs rsa_pss_pss_sha256", "RSA-PSS"),
        (Kind::P256, "-tls1_3", "ECDSA"),
        (Kind::P256, "-tls1_2", "ECDSA"),
        (Kind::P384, "-tls1_3", "ECDSA"),
        (Kind::P384, "-tls1_2", "ECDSA"),
        (Kind::Ed25519, "-tls1_3", "ed25519"),
        (Kind::Ed25519, "-tls1_2", "ed25519"),
    ] {
        let key = house.key(kind);
        let address = format!("127.0.0.1:{}", nginx.port(kind));
        let mut client = house.command("openssl", false);
        client.args(["s_client", "-connect", &address, "-CAfile", &key.certificate, "-verify_return_error"]);
        let output = client.args(options.split(' ')).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && said.contains("Verify return code: 0"),
            "{kind:?} {options}: {output:?}"
        );
        let wanted = format!("Peer signature type: {expected}\n");
        assert!(expected.is_empty() || said.contains(&wanted), "{kind:?} {options}: {said}");
    }
    for kind in [Kind::Rsa, Kind::P256] {
        let url = format!("https://localhost:{}/", nginx.port(kind));
        let key = house.key(kind);
        let said = house.run("curl", false, &["-sS", "--cacert", &key.certificate, &url]);
        assert_eq!(said, "served\n");
    }
}

#[test]
fn clients_have_certificates_from_a_vault_too() {
    let Some(house) = House::new() else { return };
    let (server, client) = (house.key(Kind::P256), house.key(Kind::Rsa));
    let port = house::free_port();
    let mut command = house.command("openssl", true);
    command.args(["s_server", "-accept", &format!("127.0.0.1:{port}"), "-www", "-Verify", "1", "-quiet"]);
    command.args(["-cert", &server.certificate, "-key", &server.reference, "-CAfile", &client.certificate]);
    let mut process =
        command.stdout(Stdio::null()).stderr(Stdio::null()).stdin(Stdio::piped()).spawn().unwrap();
    await_that("s_server listens", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    let url = format!("https://localhost:{port}/");
    let trust = ["-sS", "--cacert", &server.certificate, &url];
    let with = ["--cert", client.certificate.as_str(), "--key", client.reference.as_str()];
    let said = house.run("curl", true, &[&trust[..], &with[..]].concat());
    let refused = !house.command("curl", true).args(trust).output().unwrap().status.success();
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(said.contains("CONNECTION ESTABLISHED") || said.contains("Ciphers supported"), "{said}");
    assert!(refused, "without a certificate there is no connection");
}

#[test]
fn apache_serves_from_a_vault_with_processes_and_threads() {
    let Some(house) = House::new_as_root() else { return };
    for processes in ["event", "prefork"] {
        let Some(apache) = Apache::start(&house, Kind::P256, processes) else { return };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| (0..15).for_each(|_| apache.handshake().unwrap()));
            }
        });
        let secrets = secrets_of(&house.key(Kind::P256));
        let all = [vec![apache.master()], apache.children()].concat();
        assert!(all.len() >= 2);
        for pid in all {
            let found = house::find_in_memory(pid, &secrets);
            assert!(found.is_empty(), "{processes}: in process {pid}: {found:?}");
        }
        // Graceful: new children, and none of the clients notices.
        let before = apache.children();
        kill(apache.master(), libc::SIGUSR1);
        await_that("new children", || {
            apache.handshake().unwrap();
            apache.children().iter().any(|pid| !before.contains(pid))
        });
        apache.handshake().unwrap();
    }
}

#[test]
fn no_byte_of_a_key_is_in_nginx() {
    let Some(house) = House::new_as_root() else { return };
    let kinds = [Kind::Rsa, Kind::P256];
    for in_vault in [false, true] {
        let Some(nginx) = Nginx::start(&house, &kinds, in_vault, "") else { return };
        for kind in kinds {
            for _ in 0..20 {
                nginx.handshake(kind).unwrap();
            }
        }
        let processes = [vec![nginx.master()], nginx.workers()].concat();
        assert!(processes.len() >= 2);
        let mut places = 0;
        for pid in &processes {
            for kind in kinds {
                let found = house::find_in_memory(*pid, &secrets_of(&house.key(kind)));
                assert!(!in_vault || found.is_empty(), "in process {pid}: {found:?} of {kind:?}");
                places += found.len();
            }
        }
        assert!(in_vault || places > 8, "in plain nginx the keys lie about: {places}");
        if in_vault {
            // They are where they should be.
            let mut places = 0;
            for pid in nginx.vault() {
                places += house::find_in_memory(pid, &secrets_of(&house.key(Kind::Rsa))).len();
                let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
                let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
                assert_eq!(core.split_whitespace().skip(4).take(2).collect::<Vec<_>>(), ["0", "0"]);
            }
            assert!(places > 0);
        }
    }
}

#[test]
fn an_attacker_in_a_worker_gets_signatures_only() {
    let Some(house) = House::new_as_root() else { return };
    let intruder = house.intruder();
    for in_vault in [false, true] {
        let open = tempfile::tempdir().unwrap();
        let folder = open.path().to_str().unwrap().to_owned();
        house::let_all_write(open.path());
        // Readable by root only, like any private key.
        fs::copy(house.key(Kind::Rsa).private, open.path().join("key")).unwrap();
        let environment = [("LD_PRELOAD", intruder.as_str()), ("INTRUDER", folder.as_str())];
        let Some(nginx) = Nginx::start_with(&house, &[Kind::Rsa], in_vault, "", &environment) else { return };
        nginx.handshake(Kind::Rsa).unwrap();
        let vault = nginx.vault();
        assert_eq!(vault.len(), if in_vault { 3 } else { 0 }, "keeper, spare and twin: {vault:?}");
        let numbers: Vec<String> = vault.iter().map(ToString::to_string).collect();
        fs::write(open.path().join("go.new"), numbers.join(" ")).unwrap();
        fs::rename(open.path().join("go.new"), open.path().join("go")).unwrap();
        await_that("the intruder is through", || open.path().join("report").exists());
        let report = fs::read_to_string(open.path().join("report")).unwrap();
        let ways_in: Vec<_> = report.lines().filter(|line| line.ends_with(" in")).collect();
        assert!(ways_in.is_empty(), "{ways_in:?}");
        assert_eq!(report.lines().count(), 1 + 20 * vault.len(), "{report}");
        let dump = fs::read(open.path().join("memory")).unwrap();
        assert!(dump.len() > 1 << 20);
        let found = house::find(&dump, &secrets_of(&house.key(Kind::Rsa)));
        assert_eq!(found.is_empty(), in_vault, "{found:?}");
        // It can ask, and so the server goes on.
        nginx.handshake(Kind::Rsa).unwrap();
        assert_eq!(nginx.vault(), vault);
    }
}

/// Handshakes from several threads while something happens; how many were made, and how many failed.
fn under_load(nginx: &Nginx, kind: Kind, happening: impl FnOnce()) -> (usize, Vec<String>) {
    let (over, made) = (AtomicBool::new(false), AtomicUsize::new(0));
    let failures = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        // Also where something is not as it should be, or this would wait for them for ever.
        let _end = Over(&over);
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    match nginx.handshake(kind) {
                        Ok(()) => {
                            made.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => failures.lock().unwrap().push(error),
                    }
                }
            });
        }
        let more = |count: usize| {
            let before = made.load(Ordering::Relaxed);
            await_that("handshakes are made", || made.load(Ordering::Relaxed) >= before + count);
        };
        more(20);
        happening();
        more(50);
    });
    (made.into_inner(), failures.into_inner().unwrap())
}

const CLIENTS: usize = 4;

/// Says so when it goes.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn no_handshake_fails_of_reloads_and_dying_vaults() {
    let Some(house) = House::new_as_root() else { return };
    let Some(nginx) = Nginx::start(&house, &[Kind::P256], true, "") else { return };
    nginx.handshake(Kind::P256).unwrap();
    let (made, failures) = under_load(&nginx, Kind::P256, || {
        for _ in 0..3 {
            let before = nginx.workers();
            kill(nginx.master(), libc::SIGHUP);
            await_that("new workers", || nginx.workers().iter().any(|pid| !before.contains(pid)));
            // The oldest is the keeper, the youngest a twin: all die in turn.
            for pid in nginx.vault() {
                kill(pid, libc::SIGKILL);
                std::thread::sleep(Duration::from_millis(60));
            }
            kill(nginx.master(), libc::SIGUSR1); // reopens its logs
        }
    });
    assert!(failures.is_empty(), "{} of {made}: {:?}", failures.len(), failures.first());
}

#[test]
fn a_killed_worker_takes_its_own_handshakes_along_and_no_more() {
    let Some(house) = House::new_as_root() else { return };
    let Some(nginx) = Nginx::start(&house, &[Kind::P256], true, "") else { return };
    nginx.handshake(Kind::P256).unwrap();
    let mut twins = Vec::new();
    let (made, failures) = under_load(&nginx, Kind::P256, || {
        for _ in 0..3 {
            let (workers, vault) = (nginx.workers(), nginx.vault());
            twins.extend(vault.iter().skip(2).copied());
            kill(workers[0], libc::SIGKILL);
            await_that("a new worker", || nginx.workers().iter().any(|pid| !workers.contains(pid)));
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    assert!(failures.len() <= 3 * CLIENTS, "{} of {made}: {:?}", failures.len(), failures.first());
    assert!(!twins.is_empty());
    twins.into_iter().for_each(house::await_death);
}

#[test]
fn a_reload_replaces_a_vault_that_was_killed_as_a_whole() {
    let Some(house) = House::new_as_root() else { return };
    let Some(nginx) = Nginx::start(&house, &[Kind::P256], true, "") else { return };
    nginx.handshake(Kind::P256).unwrap();
    let vault = nginx.vault();
    // Stopped first, lest the spare take over in between.
    vault[..2].iter().for_each(|pid| kill(*pid, libc::SIGSTOP));
    vault[..2].iter().for_each(|pid| kill(*pid, libc::SIGKILL));
    vault[..2].iter().for_each(|pid| house::await_death(*pid));
    nginx.handshake(Kind::P256).unwrap();
    let before = nginx.workers();
    kill(nginx.master(), libc::SIGHUP);
    await_that("the old worker is gone", || nginx.workers().iter().all(|pid| !before.contains(pid)));
    nginx.handshake(Kind::P256).unwrap();
    assert!(nginx.vault().iter().all(|pid| !vault[..2].contains(pid)));
}

#[test]
fn a_reload_with_another_key_drops_the_old_one() {
    let Some(house) = House::new_as_root() else { return };
    house.configure("grace = 1");
    let kinds = [Kind::Rsa, Kind::P256];
    let Some(nginx) = Nginx::start(&house, &kinds, true, "") else { return };
    let old = secrets_of(&house.key(Kind::Rsa));
    let kept = secrets_of(&house.key(Kind::P256));
    let in_vault = |secrets: &[_]| {
        let has = |pid: &&i32| house::look(**pid, secrets).is_ok_and(|(found, _)| !found.is_empty());
        nginx.vault().iter().filter(has).count()
    };
    // The first reload is that of a server that became a daemon since it loaded its keys.
    for kinds in [&kinds[..], &kinds[1..]] {
        kinds.iter().for_each(|kind| nginx.handshake(*kind).unwrap());
        assert!(in_vault(&old) >= 2 && in_vault(&kept) >= 2, "keeper and spare have them");
        let before = nginx.workers();
        nginx.serve_only(&house, kinds);
        kill(nginx.master(), libc::SIGHUP);
        await_that("the old worker is gone", || nginx.workers().iter().all(|pid| !before.contains(pid)));
    }
    await_that("the old key is gone", || in_vault(&old) == 0);
    nginx.handshake(Kind::P256).unwrap();
    assert!(in_vault(&kept) >= 2, "the one that is still in use stays");
}

#[test]
fn a_new_binary_has_a_vault_of_its_own() {
    let Some(house) = House::new_as_root() else { return };
    let Some(nginx) = Nginx::start(&house, &[Kind::P256], true, "env OPENSSL_CONF;") else { return };
    nginx.handshake(Kind::P256).unwrap();
    let (old, vault) = (nginx.master(), nginx.vault());
    let (made, failures) = under_load(&nginx, Kind::P256, || {
        kill(old, libc::SIGUSR2);
        await_that("the new master", || nginx.master() != old && !nginx.workers().is_empty());
        kill(old, libc::SIGQUIT);
        house::await_death(old);
    });
    assert!(failures.is_empty(), "{} of {made}: {:?}", failures.len(), failures.first());
    vault.into_iter().for_each(house::await_death);
    nginx.handshake(Kind::P256).unwrap();
}

#[test]
fn the_vault_ends_with_the_server() {
    let Some(house) = House::new_as_root() else { return };
    for signal in [libc::SIGQUIT, libc::SIGTERM, libc::SIGKILL] {
        let Some(nginx) = Nginx::start(&house, &[Kind::P256], true, "") else { return };
        nginx.handshake(Kind::P256).unwrap();
        let (vault, workers) = (nginx.vault(), nginx.workers());
        assert_eq!(vault.len(), 3);
        kill(nginx.master(), signal);
        if signal == libc::SIGKILL {
            // The workers that it leaves behind keep the vault.
            assert_eq!(nginx.vault(), vault);
            workers.iter().for_each(|pid| kill(*pid, libc::SIGKILL));
        }
        vault.into_iter().for_each(house::await_death);
    }
}

#[test]
fn openssl_makes_all_signatures_where_it_is_told_to() {
    let Some(house) = House::new_as_root() else { return };
    house.configure("grace = 7");
    let Some(nginx) = Nginx::start(&house, &KEYS, true, "") else { return };
    nginx.handshake(Kind::P256).unwrap();
    assert!(nginx.vault().into_iter().any(has_drawn_for_aws_lc), "AWS-LC signs");
    drop(nginx);

    house.configure("signer = openssl");
    let Some(nginx) = Nginx::start(&house, &KEYS, true, "") else { return };
    KEYS.iter().for_each(|kind| nginx.handshake(*kind).unwrap());
    let vault = nginx.vault();
    assert_eq!(vault.len(), 3);
    for pid in vault {
        let arguments = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
        assert_eq!(arguments, "orrery-vault\0grace=7\0signer=openssl\0");
        assert!(!has_drawn_for_aws_lc(pid));
    }
}

/// Returns whether AWS-LC has drawn random bytes in this process. From then on it has a page that the kernel wipes in
/// copies, so as to know itself copied; OpenSSL asks for its number instead.
fn has_drawn_for_aws_lc(pid: i32) -> bool {
    let mappings = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let flags = mappings.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
    flags.into_iter().any(|flags| flags.split_whitespace().any(|flag| flag == "wf"))
}

#[test]
fn references_are_listed_with_what_became_of_their_keys() {
    let Some(house) = House::new() else { return };
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let list = |paths: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
        let output = command.args(["vault", "list"]).args(paths).stdin(Stdio::null()).output().unwrap();
        let (text, said) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
        (output.status.code(), text, said.into_owned())
    };
    let here = directory.path().to_str().unwrap();
    assert_eq!(list(&[here]), (Some(0), "No references.\n".to_owned(), String::new()));

    for (name, kind) in [("a", Kind::P256), ("b", Kind::Ed25519), ("c", Kind::Rsa)] {
        let key = at(&format!("{name}.key"));
        fs::copy(house.key(kind).private, &key).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
        house.orrery(&["vault", "wrap", &key]);
    }
    let line = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.contains(&format!("{name}.ref.pem"))).unwrap_or_default();
        line.split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
    };
    let (status, text, said) = list(&[here]);
    assert_eq!((status, text.lines().count(), said.as_str()), (Some(0), 4, ""), "{text}");
    for (name, kind) in [("a", "EC"), ("b", "Ed25519"), ("c", "RSA")] {
        assert_eq!(line(&text, name), format!("{kind} {} usable", at(&format!("{name}.key"))), "{text}");
    }

    fs::copy(house.key(Kind::P384).private, at("a.key")).unwrap();
    fs::remove_file(at("b.key")).unwrap();
    fs::set_permissions(at("c.key"), fs::Permissions::from_mode(0o644)).unwrap();
    let (status, text, said) = list(&[here]);
    assert_eq!(status, Some(1), "{text}");
    assert!(said.contains("2 of 3 references cannot be used"), "{said}");
    assert!(line(&text, "a").ends_with("unusable: the file has another key now: wrap it again"), "{text}");
    assert!(line(&text, "b").contains("unusable: cannot read it: No such file"), "{text}");
    assert!(line(&text, "c").contains("usable: others than its owner may read the key: chmod 600"), "{text}");

    // A file that is named is listed even if it is no reference.
    fs::write(at("nonsense"), "nonsense").unwrap();
    let (status, text, _) = list(&["--json", &at("c.ref.pem"), &at("nonsense")]);
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let rows = report["references"].as_array().unwrap();
    assert_eq!((status, &report["schema"], rows.len()), (Some(1), &1.into(), 2), "{text}");
    assert_eq!((&rows[0]["type"], &rows[0]["usable"]), (&"RSA".into(), &true.into()), "{text}");
    assert_eq!(rows[0]["key"].as_str(), Some(&*at("c.key")), "{text}");
    assert_eq!((&rows[1]["usable"], rows[1]["key"].is_null()), (&false.into(), true), "{text}");
    assert_eq!(list(&["/nonexistent"]).0, Some(1));
}

#[test]
fn what_is_wrong_is_said_at_the_start() {
    let Some(house) = House::new() else { return };
    let key = house.key(Kind::P256);
    let reference = fs::read_to_string(&key.reference).unwrap();
    let lines: Vec<&str> = reference.lines().collect();
    let refuses = |name: &str, text: &str, certificate: &str, expected: &[&str]| {
        let file = house.path(name);
        fs::write(&file, text).unwrap();
        let Some(said) = Nginx::test(&house, certificate, &file) else { return };
        assert!(expected.iter().all(|words| said.contains(words)), "{name}: {said}");
        assert!(said.contains("test failed"), "{name}: {said}");
    };
    let good = &key.certificate;
    refuses("truncated", &lines[..2].join("\n"), good, &["PEM_read_bio_PrivateKey() failed"]);
    let mut changed = lines.clone();
    changed[1] = "AAAAAAAAAAAAAAAA";
    refuses(
        "changed",
        &changed.join("\n"),
        good,
        &["not a reference to a key in a vault", "orrery vault wrap"],
    );
    let mut short = lines.clone();
    short.remove(2);
    refuses("short", &short.join("\n"), good, &["not a reference"]);
    refuses("other-key", &reference, &house.key(Kind::P384).certificate, &["key", "mismatch"]);

    let moved = house.path("moved.pem");
    let wrapped = house.path("moved.ref.pem");
    let wrap = || house.orrery(&["vault", "wrap", &moved, "-o", &wrapped]);
    fs::copy(&key.private, &moved).unwrap();
    wrap();
    let reference = fs::read_to_string(&wrapped).unwrap();
    fs::remove_file(&moved).unwrap();
    refuses("missing", &reference, good, &["cannot open the private key", "moved.pem: No such file"]);
    fs::copy(house.key(Kind::P384).private, &moved).unwrap();
    refuses("replaced", &reference, good, &["is not the one that was wrapped"]);
    fs::write(&moved, "nothing").unwrap();
    refuses("no-key", &reference, good, &["has no private key in PEM"]);
    house.plain_openssl(&["ec", "-in", &key.private, "-aes256", "-passout", "pass:word", "-out", &moved]);
    refuses("locked", &reference, good, &["has a passphrase"]);
    fs::copy(&key.private, &moved).unwrap();
    let Some(said) = Nginx::test(&house, good, &wrapped) else { return };
    assert!(said.contains("test is successful"), "{said}");

    let configuration = fs::read_to_string(house.configuration()).unwrap();
    house.configure("signer = gnutls");
    refuses("signer", &reference, good, &["a parameter is not supported", "signer = gnutls", "openssl"]);

    fs::write(house.configuration(), &configuration).unwrap();
    house.configure("allow = decrypt, everything");
    refuses(
        "allow",
        &reference,
        good,
        &["a parameter is not supported", "allow = decrypt, everything", "any-digest"],
    );

    // No vault to be had.
    fs::write(house.configuration(), configuration.replace("orrery-vault", "nowhere")).unwrap();
    refuses("no-vault", &reference, good, &["the vault does not work", "nowhere"]);
}

#[test]
fn wrap_refuses_what_it_should() {
    let Some(house) = House::new() else { return };
    let key = house.key(Kind::Ed25519);
    let refused = |arguments: &[&str], words: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
        let output = command.args(["vault", "wrap"]).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(words), "{arguments:?}: {said}");
    };
    refused(&["/nowhere/key.pem"], "/nowhere/key.pem");
    refused(&[&key.certificate], "no private key in PEM");
    refused(&[&key.reference], "a reference already");
    let before = fs::read(&key.private).unwrap();
    refused(&[&key.private, "-o", &key.private], "is no reference");
    assert_eq!(fs::read(&key.private).unwrap(), before);
    let text = house.orrery(&["vault", "wrap", &key.private, "-o", "-"]);
    assert_eq!(text, fs::read_to_string(&key.reference).unwrap());
}
