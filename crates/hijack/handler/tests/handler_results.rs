//! Random modules, as handlers and in Wasmtime: the same results and the same memory, or both fail.
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test stops where it cannot look, and cuts numbers as WebAssembly does"
)]

mod support;

use arbitrary::Unstructured;
use orrery_handler::{Fault, compile};
use orrery_hijack_image::handler::{FUEL, MEMORY, trap};
use orrery_testing::Random;
use support::Loaded;
use wasm_smith::{InstructionKind, InstructionKinds, MemoryOffsetChoices};
use wasmtime::{Config, Engine, Instance, Module, Store, Trap};

/// How many modules are made.
const MODULES: usize = 1000;

/// A module of integers that exports `decide` and its memory.
fn module(random: &mut Random) -> Option<Vec<u8>> {
    let shape = r#"(module (memory (export "memory") 1 1) (func (export "decide") (param i32) (result i32) (i32.const 0)))"#;
    let kinds = [
        InstructionKind::Numeric,
        InstructionKind::Variable,
        InstructionKind::Memory,
        InstructionKind::Control,
        InstructionKind::Parametric,
    ];
    let config = wasm_smith::Config {
        allow_floats: false,
        allowed_instructions: InstructionKinds::new(&kinds),
        exports: Some(wat::parse_str(shape).unwrap()),
        allow_start_export: false,
        // Random instructions fail soon.
        disallow_traps: !random.next_u64().is_multiple_of(4),
        bulk_memory_enabled: false,
        reference_types_enabled: false,
        multi_value_enabled: false,
        simd_enabled: false,
        relaxed_simd_enabled: false,
        tail_call_enabled: false,
        exceptions_enabled: false,
        memory64_enabled: false,
        gc_enabled: false,
        threads_enabled: false,
        extended_const_enabled: false,
        saturating_float_to_int_enabled: false,
        max_imports: 0,
        // That of the exports is another one.
        max_memories: 0,
        max_memory32_bytes: MEMORY as u64,
        memory_max_size_required: true,
        max_elements: 0,
        max_tables: 0,
        max_globals: 8,
        max_funcs: 6,
        max_instructions: 200,
        memory_offset_choices: MemoryOffsetChoices(80, 15, 5),
        ..wasm_smith::Config::default()
    };
    let length = 64 + usize::try_from(random.next_u64() % 4096).unwrap();
    let bytes = random.bytes(length);
    wasm_smith::Module::new(config, &mut Unstructured::new(&bytes)).ok().map(|module| module.to_bytes())
}

/// A result and what is in memory then; an error: it trapped.
type Outcome = Result<(i32, Vec<u8>), ()>;

/// What Wasmtime makes of it; nothing, if it trapped for fuel or stack, which it counts in another way, or has no such memory.
fn reference(engine: &Engine, binary: &[u8], argument: i32) -> Option<Outcome> {
    let module = Module::new(engine, binary).unwrap();
    let mut store = Store::new(engine, ());
    store.set_fuel(FUEL.unsigned_abs()).unwrap();
    let instance = Instance::new(&mut store, &module, &[]).ok()?;
    let decide = instance.get_typed_func::<i32, i32>(&mut store, "decide").unwrap();
    match decide.call(&mut store, argument) {
        Ok(verdict) => {
            let memory = instance.get_memory(&mut store, "memory")?;
            Some(Ok((verdict, memory.data(&store).to_vec())))
        }
        Err(error) => match error.downcast_ref::<Trap>() {
            Some(Trap::OutOfFuel | Trap::StackOverflow) => None,
            _ => Some(Err(())),
        },
    }
}

#[test]
fn handlers_compute_what_wasmtime_computes() {
    let mut config = Config::new();
    config.consume_fuel(true);
    let engine = Engine::new(&config).unwrap();
    let mut random = Random(0x6f72_7265);
    let (mut results, mut failures, mut written) = (0, 0, 0);
    for _ in 0..MODULES {
        let Some(binary) = module(&mut random) else { continue };
        let handler = match compile(&binary) {
            Ok(handler) => handler,
            // What the generator makes and handlers cannot have; nothing else may be refused.
            Err(Fault::Refused { what, .. }) => {
                let known = ["MemoryGrow", "GlobalGet", "data beyond", "a memory of", "CallIndirect"];
                assert!(known.iter().any(|known| what.contains(known)), "{what}");
                continue;
            }
            Err(Fault::Stack { .. } | Fault::Forbidden { .. }) => continue,
            Err(other) => panic!("{other}"),
        };
        for argument in [0, 1, -1, i32::MIN, random.next_u64() as i32] {
            // Memory is as at first.
            let mut loaded = Loaded::new(handler.clone());
            let ours = loaded.decide(argument, [0; 6]);
            if matches!(ours, Err(trap::FUEL | trap::STACK)) {
                continue;
            }
            let shown = || format!("{argument}: {ours:?}\n{binary:x?}");
            match reference(&engine, &binary, argument) {
                None => {}
                Some(Ok((verdict, memory))) => {
                    assert_eq!(ours, Ok(verdict), "{}", shown());
                    assert!(loaded.memory[..memory.len()] == memory[..], "{}", shown());
                    results += 1;
                    written += usize::from(loaded.context.dirty != 0);
                }
                Some(Err(())) => {
                    assert!(ours.is_err(), "{}", shown());
                    failures += 1;
                }
            }
        }
    }
    println!("{results} results, {written} of them with memory written to, {failures} failures");
    assert!(
        results > MODULES / 2 && failures > MODULES / 20 && written > MODULES / 50,
        "{results} {failures} {written}"
    );
}
