//! What all rooms use.

use orrery_rollback::{KeptBuffer, Rollback, abandon};

pub(crate) fn rollback() -> Rollback {
    Rollback::builder().build().unwrap()
}

pub(crate) fn tell(buffer: &KeptBuffer, text: &str) {
    buffer.push(text.as_bytes()).unwrap();
}

pub(crate) extern "C" fn give_up(_: i32) {
    abandon(77);
}

pub(crate) fn map(length: usize) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let address =
        // SAFETY: a new mapping at an address of the kernel's choice takes nothing from anybody.
        unsafe { libc::mmap(std::ptr::null_mut(), length, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert_ne!(address, libc::MAP_FAILED);
    address.cast()
}

/// Returns the table of mappings, but for the arena's insides and the stack's end, which grows by itself.
pub(crate) fn maps() -> Vec<String> {
    let text = std::fs::read_to_string("/proc/self/maps").unwrap();
    text.lines()
        .filter(|line| !line.contains("[stack]") && !line.contains("orrery") && !line.contains("perf_event"))
        .map(str::to_owned)
        .collect()
}

pub(crate) fn open_descriptors() -> Vec<(i32, String)> {
    let mut found = Vec::new();
    for number in 0..4096 {
        // SAFETY: any number may be asked about.
        if unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0 {
            let target = std::fs::read_link(format!("/proc/self/fd/{number}")).unwrap();
            found.push((number, target.to_string_lossy().into_owned()));
        }
    }
    found
}
