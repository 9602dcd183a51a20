//! Signatures over elliptic curves.

use std::collections::BTreeSet;
use std::fs;

use crate::house::{House, Kind};

/// A number that is used twice tells the key to whoever has the two signatures.
#[test]
fn no_number_is_used_twice() {
    let Some(house) = House::new() else { return };
    let signatures = house.own_program("signatures.c");
    for kind in [Kind::P256, Kind::P384] {
        let made = house.run(&signatures, true, &[&house.key(kind).reference, "3", "8"]);
        let different: BTreeSet<&str> = made.lines().collect();
        assert_eq!((made.lines().count(), different.len()), (1 + 4 * 8, 1 + 4 * 8), "{kind:?}: {made}");
    }
}

/// What is no digest is refused as OpenSSL refuses it.
#[test]
fn only_digests_are_signed() {
    let Some(house) = House::new() else { return };
    house.configure("allow = any-digest");
    let (data, signature) = (house.path("digest"), house.path("signature"));
    for kind in [Kind::P256, Kind::P384] {
        let key = house.key(kind);
        for length in [0, 1, 20, 32, 48, 64] {
            fs::write(&data, vec![7; length]).unwrap();
            for digest in [None, Some("digest:sha256"), Some("digest:sha384")] {
                let mut arguments = vec!["pkeyutl", "-sign", "-in", &data, "-out", &signature];
                arguments.extend(digest.iter().flat_map(|digest| ["-pkeyopt", *digest]));
                let signs = |key: &str, with_vault| {
                    let mut command = house.command("openssl", with_vault);
                    command.args(&arguments).args(["-inkey", key]).output().unwrap().status.success()
                };
                let (plain, ours) = (signs(&key.private, false), signs(&key.reference, true));
                assert_eq!(plain, ours, "{kind:?}: {length} bytes, {digest:?}");
                if ours {
                    let mut verify = arguments.clone();
                    verify[1] = "-verify";
                    verify[4] = "-sigfile";
                    house.plain_openssl(&[&verify[..], &["-inkey", &key.private]].concat());
                }
            }
        }
    }
}
