//! Modules that want more than a handler may have: refused before they run, or failing while they do.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test stops where it cannot look, and cuts numbers as WebAssembly does"
)]

mod support;

use std::sync::atomic::Ordering::Relaxed;

use orrery_compiled_handler::{LARGEST, forbidden};
use orrery_handler::{Fault, compile};
use orrery_hijack_image::handler::{BLOCK, MEMORY, needs, trap};
use support::Loaded;

/// A module whose `decide` has this body.
fn decides(body: &str) -> Loaded {
    loaded(&format!(r#"(module (memory 1) (func (export "decide") (param i32) (result i32) {body}))"#))
}

fn loaded(text: &str) -> Loaded {
    Loaded::new(compile(text.as_bytes()).unwrap_or_else(|error| panic!("{error}\n{text}")))
}

fn refused(text: &str) -> String {
    compile(text.as_bytes()).unwrap_err().to_string()
}

#[test]
fn a_handler_compares_an_argument() {
    let mut handler = loaded(
        r#"(module
            (import "orrery" "argument" (func $argument (param i32) (result i64)))
            (func (export "decide") (param i32) (result i32)
                (if (result i32) (i64.eq (call $argument (i32.const 1)) (i64.const 77))
                    (then (i32.const -13)) (else (i32.const 0)))))"#,
    );
    assert_eq!(handler.decide(1, [0, 77, 0, 0, 0, 0]), Ok(-13));
    assert_eq!(handler.decide(1, [77, 78, 77, 77, 77, 77]), Ok(0));
}

#[test]
fn arguments_and_the_answer_are_in_the_context() {
    let mut handler = loaded(
        r#"(module
            (import "orrery" "set_argument" (func $set (param i32 i64)))
            (import "orrery" "answer" (func $answer (param i64)))
            (import "orrery" "delay" (func $delay (param i64)))
            (func (export "decide") (param i32) (result i32)
                (call $set (i32.const 5) (i64.const -2))
                (call $answer (i64.extend_i32_s (local.get 0)))
                (call $delay (i64.const 1000))
                (i32.const 2)))"#,
    );
    assert_eq!(handler.decide(-3, [1, 2, 3, 4, 5, 6]), Ok(2));
    assert_eq!(handler.context.arguments, [1, 2, 3, 4, 5, u64::MAX - 1]);
    assert_eq!((handler.context.given[5], handler.context.result, handler.context.delay), (6, -3, 1000));
}

#[test]
fn an_argument_beyond_the_sixth_is_none() {
    for index in [6, 7, -1, i32::MIN] {
        let mut handler = loaded(&format!(
            r#"(module
                (import "orrery" "argument" (func $argument (param i32) (result i64)))
                (func (export "decide") (param i32) (result i32)
                    (i32.wrap_i64 (call $argument (i32.const {index})))))"#
        ));
        assert_eq!(handler.decide(0, [9; 6]), Err(trap::BOUNDS), "{index}");
    }
}

#[test]
fn memory_ends_where_it_ends() {
    let wide = [("i32", "load8_u", 1), ("i32", "load16_s", 2), ("i32", "load", 4)];
    for (of, load, size) in wide {
        for (offset, at) in [(0, MEMORY - size), (8, MEMORY - size - 8), (MEMORY - size, 0)] {
            let mut fits = decides(&format!("({of}.{load} offset={offset} (i32.const {at}))"));
            assert_eq!(fits.decide(0, [0; 6]), Ok(0), "{load} {offset} {at}");
            let mut beyond = decides(&format!("({of}.{load} offset={offset} (i32.const {}))", at + 1));
            assert_eq!(beyond.decide(0, [0; 6]), Err(trap::BOUNDS), "{load} {offset} {at}");
        }
    }
    for address in ["-1", "-65536", "2147483647", "65536"] {
        for access in [
            format!("(i64.store (i32.const {address}) (i64.const -1)) (i32.const 0)"),
            format!("(i64.store offset=4294967295 (i32.const {address}) (i64.const -1)) (i32.const 0)"),
            format!("(i32.load8_s (i32.add (local.get 0) (i32.const {address})))"),
        ] {
            assert_eq!(decides(&access).decide(0, [0; 6]), Err(trap::BOUNDS), "{access}");
        }
    }
    // Without memory, or with one of no page, there is no byte.
    let mut none = loaded(
        r#"(module (memory 0) (func (export "decide") (param i32) (result i32) (i32.load8_u (i32.const 0))))"#,
    );
    assert_eq!(none.decide(0, [0; 6]), Err(trap::BOUNDS));
}

#[test]
fn what_is_written_is_noted_block_by_block() {
    let bit = |at: usize| 1_u64 << (at / BLOCK);
    for at in [0, 5, BLOCK - 1, BLOCK, 3 * BLOCK + 7, MEMORY - 8] {
        for (store, size) in [("i64.store8", 1), ("i64.store16", 2), ("i64.store32", 4), ("i64.store", 8)] {
            for offset in [0, 3] {
                let Some(address) = at.checked_sub(offset) else { continue };
                let body =
                    format!("({store} offset={offset} (i32.const {address}) (i64.const -1)) (i32.const 0)");
                let mut handler = decides(&body);
                assert_eq!(handler.decide(0, [0; 6]), Ok(0), "{body}");
                assert_eq!(handler.context.dirty, bit(at) | bit(at + size - 1), "{body}");
                assert!(handler.memory[at..at + size].iter().all(|byte| *byte == 0xff));
                assert_eq!(handler.memory.iter().filter(|byte| **byte != 0).count(), size);
            }
        }
    }
}

#[test]
fn a_loop_without_end_ends() {
    assert_eq!(decides("(loop (br 0)) (i32.const 0)").decide(0, [0; 6]), Err(trap::FUEL));
    let mut nested = decides(
        "(local i32) (loop (loop (local.set 1 (i32.add (local.get 1) (i32.const 1))) (br_if 0 (local.get 1))) (br 0))
         (i32.const 0)",
    );
    assert_eq!(nested.decide(0, [0; 6]), Err(trap::FUEL));
    let mut table = decides("(block (loop (br_table 0 0 0 (local.get 0)))) (i32.const 0)");
    assert_eq!(table.decide(0, [0; 6]), Err(trap::FUEL));
}

#[test]
fn a_loop_that_ends_does_what_it_says() {
    let mut sum = decides(
        "(local i32) (block (loop (br_if 1 (i32.eqz (local.get 0)))
            (local.set 1 (i32.add (local.get 1) (local.get 0)))
            (local.set 0 (i32.sub (local.get 0) (i32.const 1))) (br 0))) (local.get 1)",
    );
    assert_eq!(sum.decide(1000, [0; 6]), Ok(500_500));
}

#[test]
fn a_recursion_without_end_ends() {
    let mut deep = loaded(
        r#"(module (func $f (export "decide") (param i32) (result i32) (i32.add (i32.const 1) (call $f (local.get 0)))))"#,
    );
    assert_eq!(deep.decide(0, [0; 6]), Err(trap::STACK));
    let mut mutual = loaded(
        r#"(module (func $f (export "decide") (param i32) (result i32) (call $g (local.get 0)))
            (func $g (param i32) (result i32) (i32.add (i32.const 1) (call $f (local.get 0)))))"#,
    );
    assert_eq!(mutual.decide(0, [0; 6]), Err(trap::STACK));
    // What ends is computed, a second time, too: the stack is given back.
    let mut shallow = loaded(
        r#"(module (func $f (export "decide") (param i32) (result i32)
            (if (result i32) (local.get 0)
                (then (i32.add (local.get 0) (call $f (i32.sub (local.get 0) (i32.const 1))))) (else (i32.const 0)))))"#,
    );
    for _ in 0..3 {
        assert_eq!(shallow.decide(10, [0; 6]), Ok(55));
    }
    // Calls that go wide in place of deep are paid for, too.
    let mut tree = loaded(
        r#"(module (func (export "decide") (param i32) (result i32) (call $f (i32.const 40)))
            (func $f (param i32) (result i32) (if (result i32) (i32.lt_s (local.get 0) (i32.const 30)) (then (i32.const 1))
                (else (i32.add (call $f (i32.sub (local.get 0) (i32.const 1))) (call $f (i32.sub (local.get 0) (i32.const 1))))))))"#,
    );
    assert_eq!(tree.decide(0, [0; 6]).is_ok(), tree.context.fuel > 0);
    let mut endless = loaded(
        r#"(module (func (export "decide") (param i32) (result i32) (loop (drop (call $f (i32.const 0))) (br 0)) (i32.const 1))
            (func $f (param i32) (result i32) (i32.const 1)))"#,
    );
    assert_eq!(endless.decide(0, [0; 6]), Err(trap::FUEL));
}

#[test]
fn divisions_fail_where_webassembly_traps() {
    for (body, expected) in [
        ("(i32.div_s (i32.const 7) (local.get 0))", Err(trap::DIVISION)),
        ("(i32.div_u (i32.const 7) (local.get 0))", Err(trap::DIVISION)),
        ("(i32.rem_s (i32.const 7) (local.get 0))", Err(trap::DIVISION)),
        ("(i32.rem_u (i32.const 7) (local.get 0))", Err(trap::DIVISION)),
        ("(i32.div_s (i32.const 0x80000000) (i32.sub (local.get 0) (i32.const 1)))", Err(trap::DIVISION)),
        ("(i32.rem_s (i32.const 0x80000000) (i32.sub (local.get 0) (i32.const 1)))", Ok(0)),
        ("(i32.wrap_i64 (i64.div_s (i64.const 0x8000000000000000) (i64.const -1)))", Err(trap::DIVISION)),
        ("(i32.wrap_i64 (i64.rem_s (i64.const 0x8000000000000000) (i64.const -1)))", Ok(0)),
        ("(i32.wrap_i64 (i64.div_u (i64.const 1) (i64.extend_i32_u (local.get 0))))", Err(trap::DIVISION)),
        ("(i32.div_s (i32.const -7) (i32.const 2))", Ok(-3)),
        ("unreachable", Err(trap::UNREACHABLE)),
    ] {
        assert_eq!(decides(body).decide(0, [0; 6]), expected, "{body}");
    }
}

/// Constants, offsets and jumps that would be instructions if the code was entered in the middle.
#[test]
fn forged_constants_are_no_instructions() {
    for bytes in ["0x050f", "0x340f", "0x80cd", "0xef010f", "0x28ae0f", "0xd0ae0ff3", "0x050f050f050f050f"] {
        let mut handler = decides(&format!(
            "(i32.eqz (i64.eqz (i64.xor (i64.extend_i32_s (local.get 0)) (i64.const {bytes}))))"
        ));
        assert_eq!(handler.decide(0, [0; 6]), Ok(1), "{bytes}");
        let value = i64::from_str_radix(&bytes[2..], 16).unwrap();
        if let Ok(value) = i32::try_from(value) {
            assert_eq!(handler.decide(value, [0; 6]), Ok(0), "{bytes}");
            let body = format!("(i32.xor (local.get 0) (i32.const {bytes}))");
            assert_eq!(decides(&body).decide(0, [0; 6]), Ok(value));
        }
    }
    // As an offset, and as a limit.
    for offset in [0x050f, 0x340f, 0x80cd, 0x0f05, MEMORY - 4 - 0x050f, MEMORY - 4 - 0x340f] {
        let body = format!(
            "(i32.store offset={offset} (local.get 0) (i32.const 1)) (i32.load offset={offset} (local.get 0))"
        );
        assert_eq!(decides(&body).decide(0, [0; 6]), Ok(1), "{offset:#x}");
    }
    // As the distance of a jump: whatever is between, the code has no such bytes, or there is none.
    let mut refused = 0;
    for count in (200..400).step_by(3) {
        let filling = "(local.set 1 (i32.mul (local.get 1) (i32.const 3)))".repeat(count);
        let text = format!(
            r#"(module (func (export "decide") (param i32) (result i32) (local i32)
                (if (local.get 0) (then {filling})) (local.get 1)))"#
        );
        match compile(text.as_bytes()) {
            Ok(handler) => assert_eq!(forbidden::find(&handler.code), None),
            Err(Fault::Forbidden { .. }) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused < 3, "{refused} of 67 are refused");
}

#[test]
fn what_handlers_cannot_have_is_refused_by_name_and_position() {
    let decide = r#"(func (export "decide") (param i32) (result i32) (i32.const 0))"#;
    for (module, said) in [
        (format!(r#"(module (import "env" "open" (func)) {decide})"#), "cannot import env.open (at byte "),
        (
            format!(r#"(module (import "orrery" "syscall" (func)) {decide})"#),
            "cannot import orrery.syscall (at byte ",
        ),
        (
            format!(r#"(module (import "orrery" "answer" (func (param i32))) {decide})"#),
            "its type is another one",
        ),
        (
            format!(r#"(module (import "orrery" "memory" (memory 1)) {decide})"#),
            "cannot import orrery.memory (at byte ",
        ),
        (format!(r#"(module (import "orrery" "answer" (memory 1)) {decide})"#), "it is a function"),
        (format!("(module (memory 2) {decide})"), "a memory of 2 pages (at byte "),
        (format!("(module (memory 65536) {decide})"), "a memory of 65536 pages (at byte "),
        (format!("(module (memory 1) (memory 1) {decide})"), "multiple memories (at byte "),
        (format!("(module (func $s) (start $s) {decide})"), "a start function (at byte "),
        (
            format!("(module (table 1 funcref) (elem (i32.const 0) $f) (func $f) {decide})"),
            "a table with functions (at byte ",
        ),
        (format!("(module (global f64 (f64.const 1)) {decide})"), "F64Const as a first value (at byte "),
        (format!("(module (func (param f32)) {decide})"), "floating-point support is disabled (at byte "),
        (format!("(module (func (drop (f32.const 1))) {decide})"), "floating-point"),
        (
            format!("(module (func (drop (v128.const i64x2 1 1))) {decide})"),
            "SIMD support is not enabled (at byte ",
        ),
        (
            format!(
                "(module (memory 1) (func (memory.fill (i32.const 0) (i32.const 0) (i32.const 1))) {decide})"
            ),
            "bulk memory",
        ),
        (
            format!("(module (memory 1) (func (drop (memory.grow (i32.const 1)))) {decide})"),
            "MemoryGrow (at byte ",
        ),
        (
            format!("(module (memory 1) (func unreachable (drop (memory.grow (i32.const 1)))) {decide})"),
            "MemoryGrow (at byte ",
        ),
        (
            format!("(module (table 1 funcref) (func (call_indirect (i32.const 0))) {decide})"),
            "CallIndirect (at byte ",
        ),
        (format!("(module (func (result i32 i32) (i32.const 0) (i32.const 0)) {decide})"), "multi"),
        (
            format!(r#"(module (memory 1) (data (i32.const 65530) "1234567") {decide})"#),
            "data beyond the memory's end (at byte ",
        ),
        (
            format!(r#"(module (memory 1) (data (i32.const -1) "1") {decide})"#),
            "data beyond the memory's end (at byte ",
        ),
        (
            format!("(module {} {decide})", "(global (mut i32) (i32.const 0))".repeat(9)),
            "more than 8 globals that change (at byte ",
        ),
        (
            format!("(module (func (local {})) {decide})", "i64 ".repeat(257)),
            "more than 256 locals (at byte ",
        ),
        (format!("(module {} {decide})", "(func)".repeat(513)), "more than 512 functions"),
        (
            format!("(module (func (param {})) {decide})", "i64 ".repeat(257)),
            "more than 256 locals (at byte ",
        ),
        ("(module)".to_owned(), "exports no function `decide`"),
        (r#"(module (func (export "decide")))"#.to_owned(), "exports no function `decide`"),
        (
            r#"(module (import "orrery" "answer" (func $a (param i64))) (export "decide" (func $a)))"#
                .to_owned(),
            "exports no function `decide`",
        ),
        (r#"(module (memory (export "decide") 1))"#.to_owned(), "exports no function `decide`"),
        ("(module (func (i32.add)))".to_owned(), "at byte"),
        ("(module".to_owned(), "expected"),
        ("\0asm\u{1}\0\0\0\u{1}".to_owned(), "at byte"),
        ("\0asm\u{d}\0\u{1}\0".to_owned(), "at byte"),
    ] {
        let message = refused(&module);
        assert!(message.contains(said), "{module}\n{message}");
    }
}

#[test]
fn large_modules_are_refused() {
    let text = format!(r#"(module (memory 1) (data (i32.const 0) "{}"))"#, "a".repeat(LARGEST));
    assert!(matches!(compile(text.as_bytes()), Err(Fault::Size { .. })));
    assert!(matches!(compile(&vec![b' '; 4 * LARGEST + 1]), Err(Fault::Size { .. })));
    // Many variables that are all needed at once.
    let sets: String = (1..250)
        .map(|index| format!("(local.set {index} (i64.load offset={} (i32.const 0)))", 8 * index))
        .collect();
    let uses: String = (1..250)
        .map(|index| format!("(i64.store offset={} (i32.const 0) (local.get {index}))", 8 * (251 - index)))
        .collect();
    let text = format!(
        r#"(module (memory 1) (func $f (param i64) (result i64) (local {}) {sets} {uses} (local.get 0))
            (func (export "decide") (param i32) (result i32) (i32.wrap_i64 (call $f (i64.extend_i32_u (local.get 0))))))"#,
        "i64 ".repeat(250)
    );
    assert!(matches!(compile(text.as_bytes()), Err(Fault::Stack { index: 0, .. })));
}

#[test]
fn a_table_that_nothing_uses_is_borne() {
    // Compilers declare one.
    let mut handler = loaded(
        r#"(module (table 1 1 funcref) (func (export "decide") (param i32) (result i32) (i32.const 0)))"#,
    );
    assert_eq!(handler.decide(0, [0; 6]), Ok(0));
}

#[test]
fn needs_are_what_the_module_does() {
    let of = |text: &str| compile(text.as_bytes()).unwrap().needs;
    let module = |body: &str| {
        of(&format!(
            r#"(module (import "orrery" "emit" (func $emit (param i32 i32) (result i32)))
                (import "orrery" "replace" (func $replace (param i32 i32 i32) (result i32)))
                (import "orrery" "copy_from" (func $copy (param i32 i32 i32 i32) (result i32)))
                (memory 1) (func (export "decide") (param i32) (result i32) {body}))"#
        ))
    };
    assert_eq!(module("(i32.const 0)"), 0);
    assert_eq!(module("(i32.load (i32.const 0))"), needs::MEMORY);
    assert_eq!(
        module("(i32.store (i32.const 0) (i32.const 0)) (i32.const 0)"),
        needs::MEMORY | needs::WRITES
    );
    let copy = "(call $copy (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 1))";
    assert_eq!(module(copy), needs::MEMORY | needs::WRITES);
    assert_eq!(module("(call $emit (i32.const 0) (i32.const 0))"), needs::MEMORY | needs::EMITS);
    let replace = "(call $replace (i32.const 0) (i32.const 0) (i32.const 0))";
    assert_eq!(module(replace), needs::MEMORY | needs::REPLACES | needs::CHANGES);
    let other = |body: &str| {
        of(&format!(
            r#"(module (import "orrery" "argument" (func $argument (param i32) (result i64)))
                (import "orrery" "set_argument" (func $set (param i32 i64)))
                (import "orrery" "answer" (func $answer (param i64)))
                (import "orrery" "delay" (func $delay (param i64)))
                (import "orrery" "count" (func $count (param i32 i64) (result i64)))
                (global $constant i32 (i32.const 3)) (global $variable (mut i32) (i32.const 3))
                (func $twice (param i32) (result i32) (i32.mul (local.get 0) (i32.const 2)))
                (func (export "decide") (param i32) (result i32) {body}))"#
        ))
    };
    for (body, needed) in [
        ("(i32.wrap_i64 (call $argument (i32.const 5)))", 0),
        ("(call $twice (global.get $constant))", 0),
        ("(loop (br_if 0 (local.get 0))) (i32.const 0)", 0),
        ("(global.get $variable)", needs::VARIABLES),
        ("(global.set $variable (i32.const 1)) (i32.const 0)", needs::VARIABLES),
        ("(call $set (i32.const 0) (i64.const 1)) (i32.const 0)", needs::CHANGES),
        ("(call $answer (i64.const 1)) (i32.const 2)", needs::CHANGES),
        ("(call $delay (i64.const 1)) (i32.const 0)", needs::CHANGES),
        ("(i32.wrap_i64 (call $count (i32.const 0) (i64.const 1)))", needs::COUNTS),
    ] {
        assert_eq!(other(body), needed, "{body}");
    }
}

#[test]
fn counters_stay_and_there_are_no_others() {
    let mut handler = loaded(
        r#"(module (import "orrery" "count" (func $count (param i32 i64) (result i64)))
            (import "orrery" "argument" (func $argument (param i32) (result i64)))
            (import "orrery" "answer" (func $answer (param i64)))
            (func (export "decide") (param i32) (result i32)
                (call $answer (call $count (i32.wrap_i64 (call $argument (i32.const 0))) (call $argument (i32.const 1))))
                (i32.const 2)))"#,
    );
    let mut count = |counter: i64, amount: i64| {
        let decided = handler.decide(1, [counter.cast_unsigned(), amount.cast_unsigned(), 0, 0, 0, 0]);
        decided.map(|_| handler.context.result)
    };
    assert_eq!([count(0, 1), count(0, 2), count(63, 5), count(0, 0)], [Ok(1), Ok(3), Ok(5), Ok(3)]);
    assert_eq!([count(0, -4), count(0, i64::MIN)], [Ok(-1), Ok(i64::MAX)], "it wraps");
    for beyond in [64, -1, 1 << 31, i64::from(u32::MAX)] {
        assert_eq!(count(beyond, 1), Err(trap::BOUNDS), "{beyond}");
    }
    assert_eq!(handler.counters.iter().filter(|counter| counter.load(Relaxed) != 0).count(), 2);
}

/// What a handler that needs nothing finds in its context is what it is given: all else may hold anything.
#[test]
fn who_needs_nothing_reads_nothing_else() {
    let mut handler = loaded(
        r#"(module (import "orrery" "argument" (func $argument (param i32) (result i64)))
            (func $same (param i64 i64) (result i32) (i64.eq (local.get 0) (local.get 1)))
            (func (export "decide") (param i32) (result i32)
                (if (result i32) (call $same (call $argument (i32.const 0)) (i64.const 0x7ead_1234_5678))
                    (then (i32.const -13)) (else (i32.const 0)))))"#,
    );
    let context = &mut handler.context;
    (context.delay, context.host, context.functions) = (0x5555, 0x5555, [0x5555; 3]);
    assert_eq!(handler.decide(1, [0x7ead_1234_5678, 0, 0, 0, 0, 0]), Ok(-13));
    assert_eq!(handler.decide(1, [1; 6]), Ok(0));
    let context = &handler.context;
    assert_eq!((context.delay, context.host, context.functions), (0x5555, 0x5555, [0x5555; 3]));
}

#[test]
fn loads_and_stores_are_as_wide_as_they_say() {
    let bytes = [0x81_u8, 0x92, 0xa3, 0xb4, 0xc5, 0xd6, 0xe7, 0xf8];
    let data: String = bytes.iter().map(|byte| format!("\\{byte:02x}")).collect();
    let word = i64::from_le_bytes(bytes);
    for (load, expected) in [
        ("i64.load", word),
        ("i64.load8_s", i64::from(word as i8)),
        ("i64.load8_u", word & 0xff),
        ("i64.load16_s", i64::from(word as i16)),
        ("i64.load16_u", word & 0xffff),
        ("i64.load32_s", i64::from(word as i32)),
        ("i64.load32_u", word & 0xffff_ffff),
        ("i64.extend_i32_u (i32.load", word & 0xffff_ffff),
        ("i64.extend_i32_u (i32.load8_s", i64::from(i32::from(word as i8).cast_unsigned())),
        ("i64.extend_i32_u (i32.load8_u", word & 0xff),
        ("i64.extend_i32_u (i32.load16_s", i64::from(i32::from(word as i16).cast_unsigned())),
        ("i64.extend_i32_u (i32.load16_u", word & 0xffff),
    ] {
        let close = if load.contains('(') { "))" } else { ")" };
        let mut handler = loaded(&format!(
            r#"(module (import "orrery" "answer" (func $answer (param i64))) (memory 1) (data (i32.const 4093) "{data}")
                (func (export "decide") (param i32) (result i32)
                    (call $answer ({load} offset=4000 (i32.const 93){close}) (i32.const 2)))"#
        ));
        assert_eq!(handler.decide(0, [0; 6]), Ok(2));
        assert_eq!(handler.context.result, expected, "{load}");
    }
    for (store, size) in [
        ("i64.store", 8),
        ("i64.store8", 1),
        ("i64.store16", 2),
        ("i64.store32", 4),
        ("i32.store", 4),
        ("i32.store8", 1),
        ("i32.store16", 2),
    ] {
        let value = if store.starts_with("i64") {
            format!("(i64.const {word})")
        } else {
            format!("(i32.const {})", word as i32)
        };
        let mut handler = decides(&format!("({store} offset=1 (i32.const 4092) {value}) (i32.const 0)"));
        assert_eq!(handler.decide(0, [0; 6]), Ok(0));
        assert_eq!(handler.memory[4093..4093 + size], bytes[..size], "{store}");
        assert!(handler.memory[4093 + size..].iter().all(|byte| *byte == 0), "{store}");
    }
}
