//! An extension that sets an attribute to twice each event's value.

#![cfg_attr(target_arch = "wasm32", no_std, no_main)]

use orrery_extension_sdk::{Event, handle};

handle!(share, "share");
handle!(tick, "tick");

fn start() {
    let _number = tick().subscribe(10_000_000);
}

fn event(event: Event) {
    let _refused = share().set(event.value * 2);
}

orrery_extension_sdk::extension!(start, event);

#[cfg(target_arch = "wasm32")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    core::arch::wasm32::unreachable()
}

/// It is of use in a manager only.
#[cfg(not(target_arch = "wasm32"))]
fn main() {}
