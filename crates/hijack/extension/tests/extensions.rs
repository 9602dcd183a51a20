//! What extensions can do, and that nothing else can be done by one.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod support;

use orrery_extension::{Abort, Event, Grant, Limits, LoadError, Module, Notice, Posted, Rights};
use support::{Bed, HANDLES, manifest, module, object};

/// Emits the result of an expression of type i32 as four bytes.
fn emits(expression: &str) -> String {
    format!(
        "(i32.store (i32.const 0) {expression}) (drop (call $emit (call $out) (i32.const 0) (i32.const 4)))"
    )
}

/// Returns what the last message says.
fn emitted(bed: &Bed) -> i32 {
    let record = bed.host.record();
    let (to, bytes) = record.emitted.last().expect("a message");
    assert_eq!(*to, object("owner", None));
    i32::from_le_bytes(bytes[..].try_into().unwrap())
}

/// Runs a body once with value 7; returns what became of it.
fn aborted(lines: &str, body: &str) -> (Bed, Vec<Notice>) {
    let mut bed = Bed::new();
    bed.host.set("share", Some("p1"), 5);
    let id = bed.load(&format!("{lines}{HANDLES}"), &module(body)).unwrap();
    bed.send(id, 7);
    let notices = bed.notices();
    (bed, notices)
}

fn cause(lines: &str, body: &str) -> Abort {
    let (_, notices) = aborted(lines, body);
    match &notices[..] {
        [Notice::Aborted { cause, failures: 1, limit: 3 }] => cause.clone(),
        other => panic!("{other:?} for {body}"),
    }
}

#[test]
fn an_extension_reads_and_sets_what_it_was_granted() {
    let mut bed = Bed::new();
    bed.host.set("used", Some("p1"), 40);
    bed.host.set("share", Some("p1"), 0);
    let body = "(drop (call $get (call $used) (i32.const 16)))
        (drop (call $set (call $share) (i64.add (local.get $value) (i64.load (i32.const 16)))))";
    let id = bed.load(HANDLES, &module(body)).unwrap();
    bed.send(id, 2);
    assert_eq!(bed.host.get("share", Some("p1")), 42);
    let status = bed.extensions.status(id).unwrap();
    assert_eq!((status.handled, status.failures, status.waiting), (1, 0, 0));
    assert!(status.longest > 0 && status.fuel > status.longest, "start counts, too: {status:?}");
    assert!(bed.notices().is_empty());
}

#[test]
fn what_the_host_refuses_is_a_code() {
    for (setup, expression, expected) in [
        (0, "(call $set (call $used) (i64.const 1))", -1),
        (0, "(call $get (call $tick) (i32.const 0))", -1),
        (0, "(call $set (call $share) (i64.const 1001))", -2),
        (0, "(call $set (call $share) (i64.const -1))", -2),
        (1000, "(call $set (call $share) (i64.const 900))", -3),
        (0, "(call $get (call $used) (i32.const 0))", -4),
        (0, "(call $subscribe (call $tick) (i64.const -1))", -6),
        (0, "(call $subscribe (call $tick) (i64.const 1))", 1),
        (0, "(call $emit (call $out) (i32.const 0) (i32.const 257))", -6),
        (0, "(call $log (i32.const 0) (i32.const 257))", -6),
    ] {
        let mut bed = Bed::new();
        bed.host.set("share", Some("another"), setup);
        let id = bed.load(HANDLES, &module(&emits(expression))).unwrap();
        bed.send(id, 0);
        assert_eq!(emitted(&bed), expected, "{expression}");
        assert!(bed.notices().is_empty(), "{expression}");
    }
}

#[test]
fn a_forged_handle_ends_the_run_and_reaches_nothing() {
    for forged in ["0", "1", "-1", "255", "0x7fffffff"] {
        for call in [
            format!("(call $set (i32.const {forged}) (i64.const 1))"),
            format!("(call $get (i32.const {forged}) (i32.const 0))"),
            format!("(call $subscribe (i32.const {forged}) (i64.const 1))"),
            format!("(call $emit (i32.const {forged}) (i32.const 0) (i32.const 1))"),
        ] {
            let (bed, notices) = aborted("", &format!("(drop {call})"));
            assert!(
                matches!(&notices[..], [Notice::Aborted { cause: Abort::Forged(_), .. }]),
                "{call}: {notices:?}"
            );
            // The two calls are the subscriptions of the two starts.
            assert_eq!(bed.host.record().calls, 2, "{call}");
        }
    }
    // The handle of another index, with this one's tag.
    let one_too_far = "(drop (call $get (i32.add (call $used) (i32.const 9)) (i32.const 0)))";
    assert!(matches!(cause("", one_too_far), Abort::Forged(_)));
}

#[test]
fn a_handle_is_good_for_one_extension_only() {
    // The first extension gets the second's handle as an event's value: the index is the same and the right differs.
    let mut bed = Bed::new();
    bed.host.set("share", Some("p2"), 5);
    let body = "(drop (call $set (i32.wrap_i64 (local.get $value)) (i64.const 99)))";
    let first = bed.load(HANDLES, &module(body)).unwrap();
    let handles = HANDLES.replace("p1", "p2");
    let second = bed.load(&handles, &module(&emits("(call $share)"))).unwrap();
    bed.send(second, 0);
    let handle = emitted(&bed);
    bed.host.set("share", Some("p1"), 1);
    bed.send(first, handle.into());
    assert_eq!(bed.host.get("share", Some("p2")), 5, "the second's attribute is out of reach");
    assert_eq!(bed.host.get("share", Some("p1")), 99, "the number stands for the first's own right");
}

#[test]
fn a_revoked_handle_is_gone_and_a_new_grant_works() {
    let mut bed = Bed::new();
    bed.host.set("used", Some("p1"), 1);
    let id = bed.load(HANDLES, &module(&emits("(call $get (call $used) (i32.const 8))"))).unwrap();
    bed.send(id, 0);
    assert_eq!(emitted(&bed), 0);
    assert!(bed.extensions.revoke(id, "used") && !bed.extensions.revoke(id, "used"));
    bed.send(id, 0);
    assert_eq!(emitted(&bed), -4);
    bed.host.set("used", Some("p2"), 2);
    let right = Grant { rights: Rights::GET, capability: object("used", Some("p2")) };
    bed.extensions.grant(id, "used", right.clone()).unwrap();
    bed.send(id, 0);
    assert_eq!(emitted(&bed), 0);
    assert!(bed.extensions.grant(id, "unheard", right).is_err());
    assert!(bed.notices().is_empty());
}

#[test]
fn runs_that_use_too_much_are_aborted() {
    assert_eq!(cause("", "(loop $again (br $again))"), Abort::Fuel);
    // Bytes count as operations: few instructions cannot do much work.
    let fill = "(loop $again (memory.fill (i32.const 0) (i32.const 1) (i32.const 65536)) (br $again))";
    assert_eq!(cause("", fill), Abort::Fuel);
    assert_eq!(cause("", "(loop $again (drop (call $clock)) (br $again))"), Abort::Fuel);
    assert_eq!(cause("", "(drop (memory.grow (i32.const 4)))"), Abort::Memory);
    assert_eq!(cause("", "(drop (memory.grow (i32.const -1)))"), Abort::Memory);
    let deep = "(call $event (local.get $sub) (local.get $time) (local.get $value) (local.get $detail))";
    assert_eq!(cause("fuel = 100_000_000\n", deep), Abort::Stack);
    // A thousand million operations take a second; the run may take 5 ms.
    let endless = "(loop $again (br $again))";
    assert_eq!(cause("fuel = 1_000_000_000\n", endless), Abort::Expired);
}

#[test]
fn memory_up_to_the_limit_is_there() {
    let (bed, notices) = aborted("", &emits("(memory.grow (i32.const 3))"));
    assert_eq!((emitted(&bed), notices), (1, vec![]));
    let (_, notices) = aborted("memory = \"64KiB\"\n", "(drop (memory.grow (i32.const 1)))");
    assert!(matches!(&notices[..], [Notice::Aborted { cause: Abort::Memory, .. }]));
}

#[test]
fn traps_and_wild_addresses_are_aborted() {
    for body in [
        "unreachable",
        "(drop (i32.div_s (i32.const 1) (i32.wrap_i64 (i64.sub (local.get $value) (i64.const 7)))))",
        "(drop (i32.load (i32.const 65536)))",
        "(i64.store offset=4294967295 (i32.const -1) (i64.const 1))",
        "(drop (i32.trunc_f32_s (f32.const nan)))",
    ] {
        assert!(matches!(cause("", body), Abort::Trap(_)), "{body}");
    }
    for body in [
        "(drop (call $get (call $share) (i32.const 65529)))",
        "(drop (call $get (call $share) (i32.const -1)))",
        "(drop (call $emit (call $out) (i32.const 65535) (i32.const 2)))",
        "(drop (call $emit (call $out) (i32.const -1) (i32.const -1)))",
        "(drop (call $log (i32.const -8) (i32.const 16)))",
    ] {
        assert_eq!(cause("", body), Abort::Address, "{body}");
    }
}

#[test]
fn an_aborted_module_starts_over_and_is_unloaded_in_the_end() {
    let mut bed = Bed::new();
    bed.host.set("share", Some("p2"), 0);
    // Counts its runs in its memory, and traps if that is not the first.
    let body = "(if (i32.load (i32.const 0)) (then unreachable)) (i32.store (i32.const 0) (i32.const 1))";
    let id = bed.load(HANDLES, &module(body)).unwrap();
    let other = "(drop (call $set (call $share) (local.get $value)))";
    let other = bed.load(&HANDLES.replace("p1", "p2"), &module(other)).unwrap();
    for _ in 0..4 {
        bed.send(id, 0);
        bed.send(other, 3);
    }
    assert!(matches!(
        &bed.notices()[..],
        [Notice::Aborted { failures: 1, limit: 3, .. }, Notice::Aborted { failures: 2, .. }]
    ));
    bed.send(id, 0);
    bed.send(id, 0);
    assert!(matches!(&bed.notices()[2..], [Notice::Unloaded { cause: Abort::Trap(_), failures: 3 }]));
    assert_eq!(bed.post(id, 0), Posted::Unknown, "its subscriptions have ended");
    assert!(bed.extensions.status(id).is_none());
    bed.send(other, 8);
    assert_eq!(bed.host.get("share", Some("p2")), 8, "the other one is as it was");
}

#[test]
fn a_start_that_fails_later_counts_as_a_failure() {
    // Its start traps unless the attribute is zero: it loads, and cannot start over.
    let wat = module("(drop (call $set (call $share) (i64.const 1))) unreachable").replace(
        "(func (export \"start\")",
        "(func (export \"start\") (drop (call $get (call $share) (i32.const 0))) (if (i32.load (i32.const 0)) (then unreachable))",
    );
    let mut bed = Bed::new();
    bed.host.set("share", Some("p1"), 0);
    let id = bed.load(HANDLES, &wat).unwrap();
    bed.send(id, 0);
    assert!(matches!(
        &bed.notices()[..],
        [
            Notice::Aborted { failures: 1, .. },
            Notice::Aborted { failures: 2, .. },
            Notice::Unloaded { failures: 3, .. }
        ]
    ));
    assert_eq!(bed.extensions.ids().count(), 0);
}

#[test]
fn events_of_an_earlier_life_are_ignored() {
    let mut bed = Bed::new();
    let id = bed.load(HANDLES, &module("unreachable")).unwrap();
    let (_, _, old) = bed.host.record().subscriptions[0].clone();
    bed.send(id, 0);
    assert_eq!(bed.extensions.post(old, Event::default()), Posted::Unknown);
    assert_eq!(bed.post(id, 0), Posted::Queued);
}

#[test]
fn a_full_queue_drops_and_counts() {
    let mut bed = Bed::new();
    let id = bed
        .load(&format!("queue = 2\n{HANDLES}"), &module(&emits("(i32.wrap_i64 (local.get $value))")))
        .unwrap();
    let posted: Vec<Posted> = (0..5).map(|value| bed.post(id, value)).collect();
    assert_eq!(posted, [Posted::Queued, Posted::Queued, Posted::Dropped, Posted::Dropped, Posted::Dropped]);
    assert_eq!(bed.notices(), [Notice::Dropped { dropped: 1 }], "one notice until it was empty");
    assert_eq!(bed.extensions.run(), None);
    assert_eq!(emitted(&bed), 1);
    let status = bed.extensions.status(id).unwrap();
    assert_eq!((status.handled, status.dropped, status.waiting), (2, 3, 0));
}

#[test]
fn a_period_has_so_many_events() {
    let mut bed = Bed::new();
    let lines = format!("events = 2\nperiod = \"10ms\"\n{HANDLES}");
    let id = bed.load(&lines, &module(&emits("(i32.wrap_i64 (local.get $value))"))).unwrap();
    for value in 0..5 {
        bed.post(id, value);
    }
    assert_eq!(bed.extensions.run(), Some(10_000_000));
    assert_eq!(emitted(&bed), 1);
    bed.host.pass(10_000_000);
    assert_eq!(bed.extensions.run(), Some(20_000_000));
    bed.host.pass(10_000_000);
    assert_eq!(bed.extensions.run(), None);
    assert_eq!(bed.extensions.status(id).unwrap().handled, 5);
}

#[test]
fn messages_and_subscriptions_are_limited() {
    let body = "(local $i i32) (loop $again (drop (call $log (i32.const 0) (i32.const 2)))
        (local.set $i (i32.add (local.get $i) (i32.const 1))) (br_if $again (i32.lt_u (local.get $i) (i32.const 20))))";
    let (bed, notices) = aborted("", body);
    assert!(notices.is_empty());
    assert_eq!(bed.host.record().lines, vec!["\u{fffd}\u{fffd}"; 16], "control characters are replaced");
    let body = "(local $last i32) (loop $again (local.set $last (call $subscribe (call $tick) (i64.const 1)))
        (br_if $again (i32.ge_s (local.get $last) (i32.const 0)))) (drop (call $set (call $share) (i64.extend_i32_s (i32.sub (i32.const 0) (local.get $last)))))";
    let (bed, _) = aborted("", body);
    assert_eq!(bed.host.record().subscriptions.len(), 64);
    assert_eq!(bed.host.get("share", Some("p1")), 5, "-(LIMIT)");
}

#[test]
fn limits_bound_the_sum() {
    let mut bed = Bed::with(Limits { extensions: 2, memory: 512 << 10, fuel: 100_000 * 4 * 100 * 2 });
    let wat = module("");
    let error = |bed: &mut Bed, lines: &str| match bed.load(&format!("{lines}{HANDLES}"), &wat) {
        Err(error @ LoadError::Sum { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(
        error(&mut bed, "memory = \"1MiB\"\n")
            .contains("the memory in bytes of all extensions would be 1048576")
    );
    assert!(error(&mut bed, "events = 9\n").contains("the operations in a second"));
    let first = bed.load(HANDLES, &wat).unwrap();
    bed.load(HANDLES, &wat).unwrap();
    assert!(error(&mut bed, "").contains("the number of all extensions would be 3; the limit is 2"));
    assert!(bed.extensions.unload(first) && !bed.extensions.unload(first));
    bed.load(HANDLES, &wat).unwrap();
}

#[test]
fn what_does_not_load_leaves_nothing() {
    let event = "(func (export \"event\") (param i32 i64 i64 i64))";
    let prelude = support::PRELUDE;
    for (wat, expected) in [
        ("(module)".to_owned(), "it exports no function `event`"),
        ("(module (func (export \"event\")))".to_owned(), "its export `event` is not of type (i32, i64, i64, i64) -> ()"),
        (format!("(module {event} (func (export \"start\") (param i32)))"), "its export `start`"),
        (format!("(module {event} (func (export \"memory\")))"), "its export `memory` is no memory"),
        (
            format!("(module (import \"wasi_snapshot_preview1\" \"fd_write\" (func (param i32 i32 i32 i32) (result i32))) {event})"),
            "cannot import wasi_snapshot_preview1.fd_write: there is no such function",
        ),
        (format!("(module (import \"orrery\" \"exec\" (func)) {event})"), "cannot import orrery.exec"),
        (format!("(module (import \"orrery\" \"clock\" (func)) {event})"), "its type is () -> (i64)"),
        (format!("(module (import \"orrery\" \"clock\" (memory 1)) {event})"), "its type is"),
        (format!("(module (import \"handle\" \"none\" (func (result i32))) {event})"), "it imports handle \"none\", which the manifest does not have"),
        (format!("(module (memory 5) {event})"), "its start was aborted: it asked for more memory"),
        (format!("(module (table 1025 funcref) {event})"), "its start was aborted: it asked for more memory"),
        (format!("(module (func $s (loop $again (br $again))) (start $s) {event})"), "its start was aborted: it used up its fuel"),
        (format!("(module {event} {prelude} (func $s (drop (call $subscribe (call $tick) (i64.const 1))) unreachable) (start $s))").replace(&format!("{event} {prelude}"), &format!("{prelude} {event}")), "its start was aborted: it trapped"),
        (format!("(module (memory i64 1) {event})"), "memory64"),
    ] {
        let mut bed = Bed::new();
        let error = bed.load(HANDLES, &wat).unwrap_err().to_string();
        assert!(error.starts_with("cannot load extension \"test\": ") && error.contains(expected), "{error}");
        assert_eq!(bed.extensions.ids().count(), 0);
        assert!(bed.host.record().subscriptions.is_empty(), "{error}");
    }
    let good = wat::parse_str(module("")).unwrap();
    let mut bed = Bed::new();
    // One end is as good: that before the section of names.
    let loads = |end: &usize| bed.load_binary(HANDLES, &good[..*end]).is_ok();
    assert_eq!((0..good.len()).filter(loads).count(), 1);
    let large = vec![0; Module::LARGEST + 1];
    assert!(matches!(Module::compile("large", &large), Err(LoadError::Size { .. })));
    let forbidden = HANDLES.replace("timer", "forbidden");
    let error = bed.load_binary(&forbidden, &good).unwrap_err().to_string();
    assert!(error.contains("handle \"tick\" is refused: the handle does not have this right"), "{error}");
    bed.load_binary(HANDLES, &good).unwrap();
}

#[test]
fn a_foreign_alarm_ends_no_run() {
    let mut bed = Bed::new();
    // Long enough for the other thread's signals to arrive.
    let body = "(local $i i32) (loop $again (local.set $i (i32.add (local.get $i) (i32.const 1)))
        (br_if $again (i32.lt_u (local.get $i) (i32.const 3000000))))";
    let id = bed.load(&format!("fuel = 100_000_000\nexpiry = \"1s\"\n{HANDLES}"), &module(body)).unwrap();
    // SAFETY: asks for the calling thread's number, and passes no memory.
    let thread = unsafe { libc::pthread_self() };
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while stopped.try_recv().is_err() {
                // SAFETY: the thread lives as long as the scope.
                unsafe { libc::pthread_kill(thread, libc::SIGVTALRM) };
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
        });
        for _ in 0..20 {
            bed.send(id, 0);
        }
        stop.send(()).unwrap();
    });
    assert!(bed.notices().is_empty(), "{:?}", bed.notices());
}

#[test]
fn extensions_move_between_threads() {
    let mut bed = Bed::new();
    let endless = "(loop $again (br $again))";
    let id = bed.load(&format!("fuel = 1_000_000_000\n{HANDLES}"), &module(endless)).unwrap();
    let bed = std::thread::spawn(move || {
        bed.send(id, 0);
        bed
    });
    let notices = bed.join().unwrap().notices();
    assert!(matches!(&notices[..], [Notice::Aborted { cause: Abort::Expired, .. }]), "{notices:?}");
}

#[test]
fn a_manifest_names_what_a_module_is_granted() {
    let manifest = manifest(HANDLES);
    assert_eq!(manifest.handles.len(), 4);
    assert_eq!(manifest.handles["share"].rights, Rights::GET | Rights::SET);
}
