//! The compiler's and the runtime's configuration: one engine for the process.

use std::sync::OnceLock;

use wasmtime::{Config, Engine, OptLevel};

/// How much stack a run may use, in bytes.
const STACK: usize = 64 << 10;

static ENGINE: OnceLock<Result<Engine, String>> = OnceLock::new();

/// Returns the engine; makes it the first time.
///
/// # Errors
/// Why it cannot be made: the same each time.
pub(crate) fn engine() -> Result<&'static Engine, String> {
    ENGINE
        .get_or_init(|| Engine::new(&config()).map_err(|error| format!("{error:#}")))
        .as_ref()
        .map_err(Clone::clone)
}

/// Ends runs that have used up their time. Async-signal-safe.
pub(crate) fn tick() {
    if let Some(Ok(engine)) = ENGINE.get() {
        engine.increment_epoch();
    }
}

fn config() -> Config {
    let mut config = Config::new();
    config.consume_fuel(true).epoch_interruption(true).max_wasm_stack(STACK);
    // Checks in the code in place of handlers for SIGSEGV, SIGILL and SIGFPE, and no 4 GiB of reserved addresses for each
    // memory: a manager locks its memory, and its signals are its own.
    config.signals_based_traps(false).memory_reservation(0).memory_guard_size(0);
    config.memory_reservation_for_growth(0).guard_before_linear_memory(false).memory_init_cow(false);
    // What the C and Rust compilers emit for wasm32, and no more: less that can be wrong.
    config.wasm_simd(false).wasm_relaxed_simd(false).wasm_tail_call(false);
    config.wasm_multi_memory(false).wasm_memory64(false).wasm_extended_const(false);
    config.cranelift_opt_level(OptLevel::Speed).wasm_backtrace_max_frames(None);
    config.generate_address_map(false).native_unwind_info(false);
    config
}
