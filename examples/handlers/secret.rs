//! Denies `openat` of paths that contain "secret", with `EACCES`, as `secret.wat` does:
//!
//! ```toml
//! [[rule]]
//! call    = "openat"
//! handler = "secret.wasm"
//! ```
//!
//! What was looked at is what is opened: the call gets the copy in place of the program's path, which another thread could change.

#![cfg_attr(target_arch = "wasm32", no_std, no_main)]

use orrery_handler_sdk::{EACCES, EFAULT, Verdict, copy_string, replace};

/// The argument that is a path.
const PATH: i32 = 1;
const SECRET: &[u8] = b"secret";

fn decide(_call: i32) -> Verdict {
    let mut room = [0; 4096];
    let path = match copy_string(PATH, &mut room) {
        Ok(path) => path,
        // An address that cannot be read: the kernel says so.
        Err(EFAULT) => return Verdict::Pass,
        Err(error) => return Verdict::Fail(error),
    };
    if path.windows(SECRET.len()).any(|part| part == SECRET) {
        return Verdict::Fail(EACCES);
    }
    match replace(PATH, path) {
        Ok(()) => Verdict::Pass,
        Err(error) => Verdict::Fail(error),
    }
}

orrery_handler_sdk::handler!(decide);

#[cfg(target_arch = "wasm32")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    core::arch::wasm32::unreachable()
}

/// It is of use in an executive only.
#[cfg(not(target_arch = "wasm32"))]
fn main() {}
