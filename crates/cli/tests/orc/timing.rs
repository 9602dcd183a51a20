//! Whether the time that an answer takes tells what another trust domain has.
//!
//! Two questions are asked in turn, in random order, many times: about what the other trust domain has, and about what nobody has. What
//! tells them apart is how often an answer of the first kind took longer than one of the second (the statistic of Mann and
//! Whitney), which is a half where there is nothing to be learned, whatever the machine does meanwhile, as it does it to both. A
//! leak that is planted, the same questions about what one has oneself, shows that the measurement would find one.

use std::time::Instant;

use orrery_orc_client::{Client, Flags, ObjectId};

use crate::{Store, bytes, connect, refusal};

/// Pairs of questions.
const PAIRS: usize = 2000;
/// Pairs of questions that take more time.
const FEWER: usize = 400;
/// How far from a half an honest store may be: seven standard deviations of [`FEWER`], which are 1/sqrt(6 * pairs).
const ALLOWED: f64 = 0.15;

/// Returns how often what the first did took longer than what the second did, between 0 and 1.
fn compare(pairs: usize, mut first: impl FnMut(usize), mut second: impl FnMut(usize)) -> f64 {
    let mut times: Vec<(u128, bool)> = Vec::new();
    let mut dice = 1_u64;
    for pair in 0..pairs {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        for turn in [dice >> 63 == 0, dice >> 63 != 0] {
            let begin = Instant::now();
            if turn {
                first(pair)
            } else {
                second(pair)
            }
            times.push((begin.elapsed().as_nanos(), turn));
        }
    }
    times.sort_unstable();
    let (mut seconds, mut wins) = (0_u32, 0.0);
    for (_, is_first) in &times {
        if *is_first { wins += f64::from(seconds) } else { seconds += 1 }
    }
    let pairs = f64::from(u32::try_from(pairs).unwrap());
    wins / (pairs * pairs)
}

/// Returns whether two kinds of questions can be told apart, given three chances to look the same: something else may
/// be going on that keeps step with one of them, but not three times.
fn is_told_apart(mut measure: impl FnMut() -> f64) -> bool {
    (0..3).all(|_| (measure() - 0.5).abs() > ALLOWED)
}

/// Returns whether the measurement can tell kinds of questions apart that differ: noise may drown the difference, but
/// not five times.
fn can_be_told_apart(mut measure: impl FnMut() -> f64) -> bool {
    (0..5).any(|_| (measure() - 0.5).abs() > ALLOWED)
}

fn named_domains() -> (tempfile::TempDir, Store, [Client; 2]) {
    let directory = tempfile::tempdir().unwrap();
    let socket = |name: &str| directory.path().join(name);
    let option = |name: &str| format!("{name}={}", socket(name).display());
    let store =
        Store::new(&["--trust-domain", &option("a"), "--trust-domain", &option("b"), "--keep", "100000"]);
    let clients = ["a", "b"].map(|name| connect(&socket(name)));
    (directory, store, clients)
}

#[test]
fn asking_takes_as_long_whether_another_trust_domain_has_it_or_not() {
    let (_directory, _store, [a, b]) = named_domains();
    let held: Vec<_> = (0..100).map(|seed| a.register(&bytes(5000, seed), Flags::none()).unwrap()).collect();
    // Names made beforehand: to make one takes time, too.
    let unknown: Vec<_> = (0..held.len()).map(|number| ObjectId::of(&number.to_le_bytes())).collect();
    let there = |pair: usize| held[pair % held.len()].id();
    let nowhere = |pair: usize| unknown[pair % unknown.len()];
    let ask = |client: &Client, id: ObjectId| drop(client.request(id));
    assert_eq!(refusal(b.request(there(0))), refusal(b.request(nowhere(0))));
    // Who has it is told at once, and gets a descriptor: that is seen.
    let planted = || compare(PAIRS, |pair| ask(&a, there(pair)), |pair| ask(&a, nowhere(pair)));
    assert!(can_be_told_apart(planted), "the measurement finds nothing");
    let stranger = || compare(PAIRS, |pair| ask(&b, there(pair)), |pair| ask(&b, nowhere(pair)));
    assert!(!is_told_apart(stranger), "a stranger learns what another trust domain has");
}

#[test]
fn registering_takes_as_long_whether_another_trust_domain_has_it_or_not() {
    let (_directory, _store, [a, b]) = named_domains();
    // Each content once, as it is one's own from then on. It takes a page, so that making one is seen.
    let content = |pair: usize, kind: u64| {
        let mut content = bytes(4096, kind);
        content[..8].copy_from_slice(&pair.to_le_bytes());
        content
    };
    let give = |client: &Client, content: &[u8]| drop(client.register(content, Flags::none()).unwrap());
    let round = std::cell::Cell::new(0);
    let measure = |of: &Client, asker: &Client| {
        let kind = round.replace(round.get() + 2);
        let known: Vec<_> = (0..FEWER).map(|pair| content(pair, kind)).collect();
        let fresh: Vec<_> = (0..FEWER).map(|pair| content(pair, kind + 1)).collect();
        known.iter().for_each(|content| give(of, content));
        compare(FEWER, |pair| give(asker, &known[pair]), |pair| give(asker, &fresh[pair]))
    };
    assert!(can_be_told_apart(|| measure(&a, &a)), "the measurement finds nothing");
    assert!(!is_told_apart(|| measure(&a, &b)), "a stranger learns what another trust domain has");
}

#[test]
fn showing_files_takes_as_long_whether_another_trust_domain_has_shown_them_or_not() {
    use std::os::fd::AsFd as _;

    use orrery_orc_client::protocol::FileRange;

    let (directory, _store, [a, b]) = named_domains();
    let piece = FileRange { flags: 0, offset: 0, length: 4096 };
    let file = |kind: u64, number: usize| {
        let path = directory.path().join("file");
        let mut content = bytes(4096, kind);
        content[..8].copy_from_slice(&number.to_le_bytes());
        // Two files of the same bytes, with nothing else in common.
        std::fs::write(&path, content).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file
    };
    let show = |client: &Client, file: &std::fs::File| {
        let (answers, _) = client.files(&[(piece, file.as_fd())]).unwrap();
        assert_eq!(answers[0].refusal, None);
    };
    let round = std::cell::Cell::new(0);
    let measure = |of: &Client, asker: &Client| {
        let kind = round.replace(round.get() + 2);
        let known: Vec<_> = (0..FEWER).map(|number| file(kind, number)).collect();
        let fresh: Vec<_> = (0..FEWER).map(|number| file(kind + 1, number)).collect();
        known.iter().for_each(|file| show(of, file));
        compare(FEWER, |pair| show(asker, &known[pair]), |pair| show(asker, &fresh[pair]))
    };
    assert!(can_be_told_apart(|| measure(&a, &a)), "the measurement finds nothing");
    assert!(!is_told_apart(|| measure(&a, &b)), "a stranger learns what another trust domain has");
}
