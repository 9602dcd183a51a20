//! Secrets that have a context to themselves.

use orrery_context::{Error, Overlay, ROOM};
use orrery_vault::Vault;

use crate::pages::{PAGE, Pages};
use crate::support::{await_end_of, become_ordinary, open_ways};

pub(crate) fn a_vault_serves() {
    let mut vault = Vault::new(
        || Ok::<_, std::io::Error>((0x5eed_u64, 0_u64)),
        |(secret, calls), input| {
            *calls += 1;
            let sum: u64 = input.iter().map(|byte| u64::from(*byte)).sum();
            [(*secret ^ sum).to_ne_bytes(), calls.to_ne_bytes()].concat()
        },
    )
    .unwrap();
    for call in 1_u64..=500 {
        let out = vault.call(&[1, 2, 3]).unwrap();
        assert_eq!(out[..8], (0x5eed_u64 ^ 6).to_ne_bytes());
        assert_eq!(out[8..], call.to_ne_bytes());
    }
    let pid = u64::try_from(vault.pid().as_raw_pid()).unwrap();
    assert!(matches!(vault.call(&vec![0; ROOM + 1]), Err(Error::TooLong { .. })));
    drop(vault);
    await_end_of(pid);
}

/// What the secret of the test below looks like in the program.
const SHIFTED: [u8; 24] = *b"ifdsfu.pg.uif.wbvmu.pomz";

/// The secret, made when called: nowhere else is it whole.
fn secret() -> Vec<u8> {
    std::hint::black_box(SHIFTED).iter().map(|byte| std::hint::black_box(*byte) - 1).collect()
}

pub(crate) fn a_vault_keeps_its_secret() {
    assert!(become_ordinary());
    let mut vault = Vault::new(
        || {
            let secret = secret();
            let words = secret.as_ptr().addr();
            Ok::<_, std::io::Error>((secret, words))
        },
        |(secret, at), input| match input {
            b"where" => at.to_ne_bytes().to_vec(),
            _ => vec![u8::from(secret == input)],
        },
    )
    .unwrap();
    let address = usize::from_ne_bytes(vault.call(b"where").unwrap().try_into().unwrap());
    let pid = vault.pid().as_raw_pid();
    assert_eq!(open_ways(pid, address), [""; 0]);
    // Nor does a capability lead there, nor does our own memory hold it.
    let context = vault.context();
    let page = std::ptr::with_exposed_provenance::<u8>(address & !(PAGE - 1));
    // SAFETY: refused before anything is mapped. (If it were not, the test would fail, and what was there would be
    // missed.)
    let overlay = |how| unsafe { context.overlay(page, PAGE, how) };
    for how in [Overlay::Copy, Overlay::Share] {
        assert!(matches!(overlay(how), Err(Error::Denied { .. })));
    }
    context.restrict(&[(0, usize::MAX & !(PAGE - 1))]).unwrap();
    assert!(matches!(overlay(Overlay::Copy), Err(Error::Denied { .. })));
    assert!(!memory_holds_secret(), "the secret is in main's memory");
    let right = secret();
    assert_eq!(vault.call(&right).unwrap(), [1]);
    assert!(memory_holds_secret(), "what is there is found");
    assert_eq!(right.len(), 24);
}

/// Returns whether the calling process' readable memory holds the secret. Neither it nor what is read is whole
/// anywhere here.
fn memory_holds_secret() -> bool {
    use std::os::unix::fs::FileExt;
    let shifted = std::hint::black_box(SHIFTED);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let memory = std::fs::File::open("/proc/self/mem").unwrap();
    let window = Pages::new(1);
    let mut looked = 0;
    for line in maps.lines().filter(|line| line.contains(" r") && !line.contains("[v")) {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let start = usize::from_str_radix(start, 16).unwrap();
        let end = usize::from_str_radix(end, 16).unwrap();
        let mut at = start;
        while at < end {
            // SAFETY: a page that stays mapped, and to which no other reference leads as long as this one is used.
            let bytes = unsafe { std::slice::from_raw_parts_mut(window.byte(0), PAGE) };
            let read = memory.read_at(bytes, at as u64).unwrap_or(0);
            let found = bytes[..read].windows(shifted.len()).position(|window| {
                window.iter().zip(shifted).all(|(byte, shifted)| byte.wrapping_add(1) == shifted)
            });
            if let Some(found) = found {
                println!("it is at {:#x} in {line}", at + found);
                return true;
            }
            looked += read;
            // Windows overlap, lest it lie across the end of one.
            at += PAGE - shifted.len();
        }
    }
    assert!(looked > 0, "nothing could be read");
    false
}

pub(crate) fn a_vault_that_panics_is_dead() {
    let mut vault = Vault::new(
        || Ok::<_, std::io::Error>(()),
        |(), input| {
            assert_ne!(input, b"panic");
            Vec::new()
        },
    )
    .unwrap();
    assert!(vault.call(b"").is_ok());
    assert!(matches!(vault.call(b"panic"), Err(Error::Died { .. })));
    assert!(matches!(vault.call(b""), Err(Error::Gone { .. })));
}

pub(crate) fn a_vault_that_cannot_load_says_why() {
    let refused = Vault::new(|| std::fs::read("/does/not/exist"), |secret, _| secret.clone()).unwrap_err();
    assert!(refused.to_string().contains("No such file"), "{refused}");
}
