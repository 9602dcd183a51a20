//! What a vault does with its keys, and what only where it is told to.

use std::fs;

use crate::house::{House, Kind};

/// Returns what `openssl` with the vault says; whether it succeeded.
fn openssl(house: &House, arguments: &[&str]) -> (bool, String) {
    let output = house.command("openssl", true).args(arguments).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

/// Something that is done with a key, and the word that allows it; empty for what always is.
struct Deed {
    kind: Kind,
    word: &'static str,
    arguments: Vec<String>,
}

fn deed(kind: Kind, word: &'static str, line: &str) -> Deed {
    Deed { kind, word, arguments: line.split(' ').map(str::to_owned).collect() }
}

fn deeds(house: &House) -> Vec<Deed> {
    let file = |name: &str, bytes: &[u8]| {
        fs::write(house.path(name), bytes).unwrap();
        house.path(name)
    };
    let data = file("data", b"some data");
    let sha2_info = file(
        "sha2",
        &[&b"\x30\x31\x30\x0d\x06\x09\x60\x86\x48\x01\x65\x03\x04\x02\x01\x05\x00\x04\x20"[..], &[7; 32]]
            .concat(),
    );
    let md5_info = file(
        "md5",
        &[&b"\x30\x20\x30\x0c\x06\x08\x2a\x86\x48\x86\xf7\x0d\x02\x05\x05\x00\x04\x10"[..], &[7; 16]]
            .concat(),
    );
    let whole = file("whole", &[&[0][..], &[1; 255]].concat());
    // The end of what PSS makes, and nothing else of it.
    let like_pss = file("like-pss", &[&[0][..], &[1; 254], &[0xbc]].concat());
    let (short, digest) = (file("short", &[7; 20]), file("digest", &[7; 32]));
    let rsa = &house.key(Kind::Rsa).private;
    let mut all = Vec::new();
    for (kind, digest, options, word) in [
        (Kind::Rsa, "sha256", "", ""),
        (Kind::Rsa, "sha384", "", ""),
        (Kind::Rsa, "sha512", "", ""),
        (Kind::Rsa, "sha256", " -sigopt rsa_padding_mode:pss", ""),
        (Kind::Rsa, "sha512", " -sigopt rsa_padding_mode:pss -sigopt rsa_mgf1_md:sha256", ""),
        (Kind::Rsa, "sha1", "", "any-digest"),
        (Kind::Rsa, "md5", "", "any-digest"),
        (Kind::Rsa, "sha3-256", "", "any-digest"),
        (Kind::Rsa, "sha1", " -sigopt rsa_padding_mode:pss", "any-digest"),
        (Kind::Rsa, "sha256", " -sigopt rsa_padding_mode:pss -sigopt rsa_mgf1_md:sha1", "any-digest"),
        (Kind::RsaPss, "sha256", "", ""),
        (Kind::RsaPss, "sha1", "", "any-digest"),
        (Kind::P256, "sha256", "", ""),
        (Kind::P256, "sha384", "", ""),
        (Kind::P384, "sha384", "", ""),
        (Kind::P256, "sha1", "", "any-digest"),
        (Kind::P384, "sha3-384", "", "any-digest"),
    ] {
        all.push(deed(kind, word, &format!("dgst -{digest}{options} -out /dev/null -sign KEY {data}")));
    }
    let mut sign = |kind, word, options: &str, input: &str| {
        all.push(deed(kind, word, &format!("pkeyutl -sign -inkey KEY -in {input} -out /dev/null{options}")));
    };
    sign(Kind::Rsa, "", "", &sha2_info);
    sign(Kind::Rsa, "any-digest", "", &md5_info);
    sign(Kind::Rsa, "any-digest", "", &data);
    sign(Kind::Rsa, "raw", " -pkeyopt rsa_padding_mode:x931 -pkeyopt digest:sha256", &digest);
    sign(Kind::P256, "", "", &digest);
    sign(Kind::P256, "any-digest", "", &short);
    sign(Kind::Ed25519, "", " -rawin", &data);
    // pkeyutl signs nothing that is longer than a digest.
    for input in [&whole, &like_pss] {
        all.push(deed(Kind::Rsa, "raw", &format!("rsautl -sign -raw -inkey KEY -in {input} -out /dev/null")));
    }
    for mode in ["pkcs1", "oaep"] {
        let cipher = house.path(mode);
        let option = format!("rsa_padding_mode:{mode}");
        let encrypt =
            ["pkeyutl", "-encrypt", "-inkey", rsa, "-in", &data, "-out", &cipher, "-pkeyopt", &option];
        house.plain_openssl(&encrypt);
        let line = format!("pkeyutl -decrypt -inkey KEY -in {cipher} -out /dev/null -pkeyopt {option}");
        all.push(deed(Kind::Rsa, "decrypt", &line));
    }
    let line =
        format!("pkeyutl -decrypt -inkey KEY -in {whole} -out /dev/null -pkeyopt rsa_padding_mode:none");
    all.push(deed(Kind::Rsa, "decrypt, raw", &line));
    all
}

#[test]
fn what_tls_does_not_need_is_refused_unless_it_is_allowed() {
    let Some(house) = House::new() else { return };
    let plain = fs::read_to_string(house.configuration()).unwrap();
    for deed in deeds(&house) {
        let key = house.key(deed.kind).reference;
        let arguments: Vec<&str> =
            deed.arguments.iter().map(|word| if word == "KEY" { key.as_str() } else { word }).collect();
        fs::write(house.configuration(), &plain).unwrap();
        let (good, text) = openssl(&house, &arguments);
        assert_eq!(good, deed.word.is_empty(), "{:?} {arguments:?}: {text}", deed.kind);
        if good {
            continue;
        }
        let wanted = format!("allow = {}", deed.word);
        assert!(text.contains("policy does not allow") && text.contains(&wanted), "{arguments:?}: {text}");
        house.configure(&wanted);
        let (good, text) = openssl(&house, &arguments);
        assert!(good, "{:?} {arguments:?}: {text}", deed.kind);
        // The other words do not allow it.
        for other in ["decrypt", "any-digest", "raw"] {
            if !deed.word.contains(other) || deed.word != other {
                fs::write(house.configuration(), &plain).unwrap();
                house.configure(&format!("allow = {other}"));
                assert!(!openssl(&house, &arguments).0, "{other}: {arguments:?}");
            }
        }
    }
}

#[test]
fn the_configuration_that_is_printed_has_the_policy() {
    let Some(house) = House::new() else { return };
    let conf = |arguments: &[&str]| house.orrery(&[&["vault", "conf"], arguments].concat());
    assert!(!conf(&[]).contains("allow"));
    assert!(conf(&["--allow", "decrypt"]).contains("\nallow = decrypt\n"));
    assert!(conf(&["--allow", "raw,any-digest"]).contains("\nallow = raw, any-digest\n"));
}
