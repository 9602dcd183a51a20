//! Random writes that both sides can work out, and what a session can see of itself.

use super::obedient::{WORDS, field};

/// A generator of numbers, for writes that both sides can work out.
pub(crate) fn numbers(mut seed: u64) -> impl FnMut() -> u64 {
    move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    }
}

/// Writes at random places, of memory and of what belongs to the process beside it.
pub(crate) fn scribble(seed: u64) {
    let mut next = numbers(seed | 1);
    for _ in 0..next() % 200 {
        let at = usize::try_from(next()).unwrap() % field().len();
        field()[at] = next().to_le_bytes()[0];
    }
    // SAFETY: memory is mapped where there was none, and pages of the field are emptied, of which any byte is a value.
    // Descriptors, directory, signals and mask are the session's own, and nothing in it relies on them.
    unsafe {
        match next() % 6 {
            0 => {
                let new = libc::mmap(
                    std::ptr::null_mut(),
                    4096 * (1 + usize::try_from(next() % 50).unwrap()),
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                    -1,
                    0,
                );
                new.cast::<u8>().write(1);
            }
            1 => {
                libc::dup2(1, 200 + i32::try_from(next() % 50).unwrap());
            }
            2 => {
                libc::signal(libc::SIGUSR1, libc::SIG_IGN);
                libc::umask(u32::try_from(next() % 0o777).unwrap());
            }
            3 => {
                assert_eq!(libc::chdir(c"/proc".as_ptr()), 0);
            }
            4 => {
                // The field itself, in part: gone, and another one in its place.
                let at = field().as_mut_ptr().addr().next_multiple_of(4096) + 4096 * 8;
                libc::madvise(std::ptr::with_exposed_provenance_mut(at), 4096 * 3, libc::MADV_DONTNEED);
            }
            _ => {
                WORDS.with_borrow_mut(|words| {
                    words.push("x".repeat(usize::try_from(next() % 10_000).unwrap()))
                });
            }
        }
    }
}

/// Returns what a session can see of itself, as a number.
pub(crate) fn state() -> u64 {
    let mut sum = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |byte: u8| sum = (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    field().iter().copied().for_each(&mut add);
    WORDS.with_borrow(|words| words.concat().bytes().for_each(&mut add));
    let directory = std::env::current_dir().unwrap();
    directory.to_string_lossy().bytes().for_each(&mut add);
    // SAFETY: asks for numbers, and writes to the action, of which zero is a value.
    unsafe {
        for fd in 0..300 {
            add(u8::from(libc::fcntl(fd, libc::F_GETFD) >= 0));
        }
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGUSR1, std::ptr::null(), &raw mut action);
        add(u8::from(action.sa_sigaction == libc::SIG_IGN));
        let mask = libc::umask(0);
        libc::umask(mask);
        mask.to_le_bytes().into_iter().for_each(&mut add);
    }
    // New mappings show in their number; those of the allocator come and go within the heap.
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').next().unwrap().bytes().for_each(&mut add);
    sum
}
