//! A secret that a session puts wherever it can, and a search for it in all that a session can read.

use super::obedient::{WORDS, field};

/// A secret that is nowhere in the program's text, nor in what is sent: in halves, the second one back to front.
pub(crate) const FIRST: &str = "hidden-0d1f";

pub(crate) const SECOND: &str = "25c79ea3-";

fn secret(argument: &str) -> Vec<u8> {
    let (first, second) = argument.split_once(' ').unwrap();
    first.bytes().chain(second.bytes().rev()).collect()
}

/// Puts the secret wherever a session can.
pub(crate) fn fill(argument: &str) {
    let secret = secret(argument);
    for page in field().chunks_mut(4096) {
        page[100..100 + secret.len()].copy_from_slice(&secret);
    }
    let mut heap: Vec<Vec<u8>> = (0..2000).map(|size| secret.repeat(1 + size % 90)).collect();
    heap.truncate(1000);
    std::mem::forget(heap);
    deep(&secret, 200);
    // SAFETY: a new mapping takes nothing from anybody, and has room for what is copied into it; names end with a zero;
    // no other thread reads the environment.
    unsafe {
        let new = libc::mmap(
            std::ptr::null_mut(),
            1 << 20,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        std::ptr::copy_nonoverlapping(secret.as_ptr(), new.cast::<u8>().add(5000), secret.len());
        let name = std::ffi::CString::new(secret.clone()).unwrap();
        libc::setenv(name.as_ptr(), name.as_ptr(), 1);
        let file = libc::memfd_create(name.as_ptr(), 0);
        assert_eq!(libc::write(file, secret.as_ptr().cast(), secret.len()), secret.len().cast_signed());
    }
    let text = String::from_utf8(secret).unwrap();
    WORDS.with_borrow_mut(|words| words.push(text.clone()));
    std::thread::spawn(move || deep(text.as_bytes(), 20)).join().unwrap();
}

fn deep(secret: &[u8], depth: usize) {
    let mut frame = [0_u8; 1000];
    frame[300..300 + secret.len()].copy_from_slice(secret);
    std::hint::black_box(&mut frame);
    if depth > 0 {
        deep(secret, depth - 1);
    }
    std::hint::black_box(&frame);
}

/// Returns how often the secret is in readable memory, where, and how much was looked at.
pub(crate) fn search(argument: &str) -> String {
    let (first, second) = argument.split_once(' ').unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut found = Vec::new();
    let mut looked = 0;
    for line in maps.lines() {
        let mut fields = line.split_whitespace();
        let (range, protection) = (fields.next().unwrap(), fields.next().unwrap());
        if !protection.starts_with('r') || line.ends_with("[vvar]") || line.ends_with("[vvar_vclock]") {
            continue;
        }
        let (start, end) = range.split_once('-').unwrap();
        let (start, end) =
            (usize::from_str_radix(start, 16).unwrap(), usize::from_str_radix(end, 16).unwrap());
        // By the kernel's hand: parts of the engine's arena are files that end before their mapping.
        for page in (start..end).step_by(4096) {
            let mut copy = [0_u8; 4096 + 64];
            let length = read_own(page, &mut copy[..(end - page).min(4096 + 64)]);
            looked += usize::from(length > 0);
            let mut from = 0;
            while let Some(at) = copy[from..length].windows(first.len()).position(|w| w == first.as_bytes()) {
                let behind = from + at + first.len();
                let follows =
                    second.bytes().rev().eq(copy[behind..length].iter().copied().take(second.len()));
                if follows && from + at < 4096 {
                    found.push(format!("{:x}", page + from + at));
                }
                from = behind;
            }
        }
    }
    format!(
        "{} pages={looked} at={}",
        found.len(),
        found.iter().take(8).cloned().collect::<Vec<_>>().join(",")
    )
}

/// Reads the calling process' memory without faulting.
fn read_own(address: usize, buffer: &mut [u8]) -> usize {
    let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let remote =
        libc::iovec { iov_base: std::ptr::with_exposed_provenance_mut(address), iov_len: buffer.len() };
    let read =
        // SAFETY: writes to the buffer, within its length; what cannot be read is an error.
        unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(read).unwrap_or(0)
}
