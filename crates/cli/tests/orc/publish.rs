//! Ranges of a running program, replaced by objects.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use orrery_orc_client::{Client, Error, PageRange};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};

use crate::{Store, bytes};

const PAGE: usize = 4096;

/// Fresh memory with these bytes.
pub(crate) fn memory(content: &[u8], access: MprotectFlags) -> (*mut u8, PageRange) {
    let length = content.len();
    // SAFETY: a new mapping at an address of the kernel's choice, filled before it is protected.
    let start = unsafe {
        let rw = ProtFlags::READ | ProtFlags::WRITE;
        let start = mmap_anonymous(core::ptr::null_mut(), length, rw, MapFlags::PRIVATE).unwrap();
        core::ptr::copy_nonoverlapping(content.as_ptr(), start.cast(), length);
        mprotect(start, length, access).unwrap();
        start
    };
    (start.cast(), PageRange::new(start.expose_provenance(), start.addr() + length))
}

pub(crate) fn publish(
    client: &Client,
    range: PageRange,
    freeze: bool,
) -> Result<orrery_orc_client::Published, Error> {
    // SAFETY: memory of this test's own, which nobody writes to or remaps.
    unsafe { client.publish(range, freeze) }
}

fn reason(client: &Client, range: PageRange, freeze: bool) -> &'static str {
    match publish(client, range, freeze) {
        Err(Error::Range { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

fn backing(address: usize) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        let end = rest.split(' ').next().unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        (number(start)..number(end)).contains(&address)
    });
    line.unwrap().to_owned()
}

#[test]
fn equal_ranges_become_one_object() {
    let store = Store::new(&[]);
    let client = store.client();
    let content = bytes(40 * PAGE, 1);
    let (_, one) = memory(&content, MprotectFlags::READ);
    let (start, two) = memory(&content, MprotectFlags::READ | MprotectFlags::WRITE);
    let first = publish(&client, one, false).unwrap();
    assert!(!first.found);
    assert!(reason(&client, two, false).contains("writable"));
    let second = publish(&client, two, true).unwrap();
    assert!(second.found && second.object.id() == first.object.id());
    for range in [one, two] {
        // SAFETY: mapped, and nobody writes to it.
        let now = unsafe {
            core::slice::from_raw_parts(core::ptr::with_exposed_provenance::<u8>(range.start), range.len())
        };
        assert_eq!(now, content);
        assert!(backing(range.start).contains("/memfd:orc:"), "{}", backing(range.start));
        assert!(backing(range.start).contains(" r--p "));
    }
    // The pages live without the store, and without the handles.
    drop((first, second, store));
    // SAFETY: the object is mapped with more than 40 pages, and nothing writes to it.
    assert_eq!(unsafe { start.add(39 * PAGE).read() }, content[39 * PAGE]);
}

#[test]
fn readers_never_notice() {
    let store = Store::new(&[]);
    let client = store.client();
    let content = bytes(64 * PAGE, 2);
    let sum = |bytes: &[u8]| {
        bytes
            .chunks(8)
            .fold(0_u64, |sum, word| sum.rotate_left(1) ^ u64::from_le_bytes(word.try_into().unwrap()))
    };
    let wanted = sum(&content);
    let (start, range) = memory(&content, MprotectFlags::READ);
    let address = start.expose_provenance();
    let done = AtomicBool::new(false);
    let reads = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    // SAFETY: it stays mapped for the whole test.
                    let now = unsafe {
                        core::slice::from_raw_parts(
                            core::ptr::with_exposed_provenance::<u8>(address),
                            64 * PAGE,
                        )
                    };
                    assert_eq!(sum(now), wanted);
                    // The kernel reads on the program's behalf, too.
                    let mut pipe = std::fs::File::options().write(true).open("/dev/null").unwrap();
                    std::io::Write::write_all(&mut pipe, now).unwrap();
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let stop = scopeguard(&done);
        for _ in 0..300 {
            publish(&client, range, false).unwrap();
        }
        crate::eventually("some reads", || reads.load(Ordering::Relaxed) > 30);
        drop(stop);
    });
}

/// Ends the readers, even where the test fails.
fn scopeguard(done: &AtomicBool) -> impl Drop + '_ {
    struct Guard<'a>(&'a AtomicBool);
    impl Drop for Guard<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    Guard(done)
}

#[cfg(target_arch = "x86_64")]
#[test]
fn code_goes_on_running() {
    let store = Store::new(&["--executables", "any"]);
    let client = store.client();
    // mov eax, edi; add eax, 1; ret
    let mut content = vec![0x90; 2 * PAGE];
    content[..6].copy_from_slice(&[0x89, 0xf8, 0x83, 0xc0, 0x01, 0xc3]);
    let (start, range) = memory(&content, MprotectFlags::READ | MprotectFlags::EXEC);
    // SAFETY: the bytes are a function of this type.
    let successor: extern "C" fn(i32) -> i32 = unsafe { core::mem::transmute(start) };
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut number = 0;
            while !done.load(Ordering::Relaxed) {
                assert_eq!(successor(number), number + 1);
                number = (number + 1) % 1000;
            }
        });
        let stop = scopeguard(&done);
        for _ in 0..300 {
            let published = publish(&client, range, false).unwrap();
            assert!(published.object.is_executable());
        }
        drop(stop);
    });
    assert!(backing(range.start).contains(" r-xp ") && backing(range.start).contains("/memfd:orc:"));
}

#[test]
fn what_is_not_fit_is_left_alone() {
    let store = Store::new(&[]);
    let client = store.client();
    let read = MprotectFlags::READ;
    let (start, range) = memory(&bytes(4 * PAGE, 3), read);
    let part = |from: usize, to: usize| PageRange { start: range.start + from, end: range.start + to };
    assert!(reason(&client, part(1, PAGE), false).contains("whole pages"));
    assert!(reason(&client, part(0, PAGE + 1), false).contains("whole pages"));
    assert!(reason(&client, part(PAGE, PAGE), false).contains("whole pages"));
    // SAFETY: the test's own memory, not used through references.
    unsafe {
        mprotect(start.add(PAGE).cast(), PAGE, MprotectFlags::empty()).unwrap();
        assert!(reason(&client, range, false).contains("cannot be read"));
        mprotect(start.add(PAGE).cast(), PAGE, read | MprotectFlags::WRITE).unwrap();
        assert!(reason(&client, range, true).contains("different protections"));
        mprotect(start.add(PAGE).cast(), PAGE, read | MprotectFlags::WRITE | MprotectFlags::EXEC).unwrap();
        assert!(reason(&client, part(PAGE, 2 * PAGE), true).contains("writable and executable"));
        rustix::mm::munmap(start.add(PAGE).cast(), PAGE).unwrap();
    }
    assert!(reason(&client, part(0, 3 * PAGE), false).contains("not mapped"));
    assert!(reason(&client, part(PAGE, 2 * PAGE), false).contains("not mapped"));
    let local = 0_u8;
    let page = core::ptr::from_ref(&local).addr() / PAGE * PAGE;
    assert!(reason(&client, PageRange::new(page, page + PAGE), false).contains("writable"));
    // SAFETY: a new mapping.
    let shared =
        unsafe { mmap_anonymous(core::ptr::null_mut(), PAGE, ProtFlags::READ, MapFlags::SHARED) }.unwrap();
    let shared = PageRange::new(shared.addr(), shared.addr() + PAGE);
    assert!(reason(&client, shared, false).contains("shared memory"));
    // Code that the policy does not allow stays what it is.
    let (_, code) = memory(&bytes(PAGE, 4), read | MprotectFlags::EXEC);
    assert_eq!(crate::refusal(publish(&client, code, false)), orrery_orc_client::Refusal::Denied);
    assert!(!backing(code.start).contains("memfd"));
    // Memory that could not be published is writable again.
    let small = Store::new(&["--quota", "4K"]);
    let (start, range) = memory(&bytes(4 * PAGE, 5), read | MprotectFlags::WRITE);
    assert_eq!(crate::refusal(publish(&small.client(), range, true)), orrery_orc_client::Refusal::Quota);
    // SAFETY: the test's own memory.
    unsafe { start.write(1) };
}
