//! Random modules: whatever they do, the manager goes on, nothing is reached that was not granted, and the others' events are
//! handled.
//!
//! `ORRERY_MODULES` is how many (20,000 otherwise), `ORRERY_SEED` makes them others.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod support;

use arbitrary::Unstructured;
use orrery_extension::{Event, Manifest, Module};
use orrery_testing::Random;
use support::{Bed, HANDLES, grant, manifest, module, object};
use wasm_smith::Config;

/// What a random module may import, and what it exports.
const SHAPE: &str = "(module PRELUDE (func (export \"event\") (param i32 i64 i64 i64)))";

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().map_or(otherwise, |text| text.parse().unwrap())
}

fn config(shape: &[u8]) -> Config {
    Config {
        available_imports: Some(shape.to_vec()),
        exports: Some(shape.to_vec()),
        simd_enabled: false,
        relaxed_simd_enabled: false,
        tail_call_enabled: false,
        exceptions_enabled: false,
        gc_enabled: false,
        threads_enabled: false,
        extended_const_enabled: false,
        max_funcs: 8,
        max_instructions: 60,
        max_imports: 12,
        max_memory32_bytes: 4 << 16,
        max_table_elements: 200,
        max_data_segments: 4,
        max_element_segments: 4,
        max_elements: 20,
        max_globals: 8,
        max_types: 12,
        ..Config::default()
    }
}

/// How modules ended, so that the test can show that all kinds occur.
#[derive(Debug, Default)]
struct Ends {
    refused: u64,
    not_started: u64,
    aborted: u64,
    handled: u64,
    calls: u64,
}

fn try_modules(count: u64, mut random: Random) -> Ends {
    let shape = wat::parse_str(SHAPE.replace("PRELUDE", support::PRELUDE)).unwrap();
    let good = wat::parse_str(module("(drop (call $set (call $share) (local.get $value)))")).unwrap();
    let config = config(&shape);
    let hostile: Manifest = manifest(&format!("failures = 1\nexpiry = \"1s\"\n{HANDLES}"));
    let mut bed = Bed::new();
    bed.host.set("share", Some("neighbour"), 0);
    bed.host.set("secret", None, 42);
    let neighbour = HANDLES.replace("p1", "neighbour");
    let neighbour =
        bed.load(&neighbour, &module("(drop (call $set (call $share) (local.get $value)))")).unwrap();
    let mut ends = Ends::default();
    for serial in 0..count {
        let bytes = if random.below(8) == 0 {
            let mut damaged = good.clone();
            for _ in 0..=random.below(4) {
                let at = random.below(damaged.len());
                damaged[at] = u8::try_from(random.below(256)).unwrap();
            }
            damaged
        } else {
            let size = 64 + random.below(700);
            let input = random.bytes(size);
            match wasm_smith::Module::new(config.clone(), &mut Unstructured::new(&input)) {
                Ok(module) => module.to_bytes(),
                Err(_) => continue,
            }
        };
        bed.host.set("used", Some("p1"), 3);
        bed.host.set("share", Some("p1"), 0);
        bed.host.record().emitted.clear();
        let loaded = Module::compile("random", &bytes)
            .and_then(|module| bed.extensions.load(&module, &hostile, grant));
        let id = match loaded {
            Ok(id) => id,
            Err(orrery_extension::LoadError::Start { .. }) => {
                ends.not_started += 1;
                continue;
            }
            Err(_) => {
                ends.refused += 1;
                continue;
            }
        };
        // It may not have subscribed: events come all the same.
        let subscriber = orrery_extension::Subscriber { extension: id, subscription: 0, incarnation: 0 };
        for value in 0..3 {
            bed.extensions.post(subscriber, Event { time: serial, value, detail: -value });
        }
        bed.host.pass(1_000_000_000);
        bed.extensions.run();
        let alive = bed.extensions.unload(id);
        ends.aborted += u64::from(!alive);
        ends.handled += u64::from(alive);
        assert!(bed.host.record().subscriptions.iter().all(|(_, _, to)| to.extension == neighbour));
        if serial % 64 == 0 {
            let value = i64::try_from(serial % 100).unwrap();
            bed.send(neighbour, value);
            assert_eq!(bed.host.get("share", Some("neighbour")), value);
        }
    }
    let record = bed.host.record();
    let reached: Vec<_> = record.attributes.keys().collect();
    assert_eq!(
        reached,
        [
            &object("secret", None),
            &object("share", Some("neighbour")),
            &object("share", Some("p1")),
            &object("used", Some("p1"))
        ]
    );
    assert_eq!(record.attributes[&object("secret", None)], 42);
    assert_eq!(record.attributes[&object("used", Some("p1"))], 3, "granted for reading only");
    ends.calls = record.calls;
    drop(record);
    assert_eq!(bed.extensions.status(neighbour).unwrap().failures, 0);
    ends
}

#[test]
fn random_modules_harm_nobody() {
    let (count, seed) = (number("ORRERY_MODULES", 20_000), number("ORRERY_SEED", 1));
    let threads = 2;
    let work = |thread| move || try_modules(count / threads, Random(seed.wrapping_mul(1_000_003) + thread));
    let all: Vec<Ends> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(work(thread))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    println!("{all:?}");
    for ends in all {
        let kinds = [ends.refused, ends.not_started, ends.aborted, ends.handled, ends.calls];
        assert!(kinds.into_iter().all(|kind| kind > 0), "some end does not occur: {ends:?}");
    }
}
