//! A task that overwrites what its orbit shares with main.

use std::time::{Duration, Instant};

use orrery_orbit::{Call, Error, Fault, Orbit, Task};

use crate::common::{area, childless, ends, number, read};
use crate::support::{fault, orbit, restarting};

/// The memory that this process can write and shares with others, found as a stray or hostile task would: by looking.
fn shared_mappings() -> Vec<(usize, usize)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let line = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        rest.starts_with("rw-s").then(|| (number(start), number(end)))
    };
    maps.lines().filter_map(line).collect()
}

/// Overwrites what the orbit shares with main: with the argument's byte, or at random.
fn vandalise(task: &mut Task<'_>) -> i64 {
    let byte = task.arguments()[0];
    let mut random = (u64::from(byte) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for (start, end) in shared_mappings() {
        for at in (start..end).step_by(8) {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let value = if byte < 128 { random } else { u64::from_ne_bytes([byte; 8]) };
            // SAFETY: mapped and writable; what becomes of the orbit by that is the case's question.
            unsafe { std::ptr::without_provenance_mut::<u64>(at).write_volatile(value) };
        }
    }
    0
}

pub(crate) fn corrupted_memory_is_noticed() {
    for byte in (0..40).chain([128, 200, 255]) {
        let orbit = orbit(vandalise);
        let begin = Instant::now();
        let result = orbit.call(&Call::new().arguments(&[byte]).time_limit(Duration::from_secs(2)));
        // It may crash by itself first; it never answers with a value, and main is neither harmed nor stuck.
        let seen = fault(result);
        assert!(
            matches!(
                seen,
                Fault::Corrupted { .. }
                    | Fault::Signal { .. }
                    | Fault::Exited { .. }
                    | Fault::TimeLimit { .. }
            ),
            "{byte}: {seen:?}"
        );
        assert!(begin.elapsed() < Duration::from_secs(20));
        assert!(ends(orbit.pid().unwrap()));
    }
}

pub(crate) fn a_corrupted_orbit_comes_back_clean() {
    let area = area();
    let number = number(&area);
    let orbit = restarting(Orbit::builder("vandal")).entry(read).create().unwrap();
    let areas = [&area];
    let bytes = number.address();
    let call = Call::new().areas(&areas).arguments(&bytes);
    for i in 0..20 {
        number.set(i);
        assert_eq!(orbit.call(&call), Ok(i));
        let byte = [u8::try_from(i).unwrap()];
        let limited = Call::new().function(vandalise).arguments(&byte).time_limit(Duration::from_secs(2));
        assert!(orbit.call(&limited).is_err());
    }
    assert_eq!(orbit.call(&call), Ok(19));
}

/// Writes the argument's word over all shared memory (a random one each time for `u32::MAX`), then crashes.
fn scribble(task: &mut Task<'_>) -> i64 {
    let word: u32 = task.argument().unwrap();
    let mut random = 0x9e37_79b9_u32 ^ std::process::id();
    for (start, end) in shared_mappings() {
        for at in (start..end).step_by(4) {
            random ^= random << 13;
            random ^= random >> 17;
            random ^= random << 5;
            let value = if word == u32::MAX { random } else { word };
            // SAFETY: mapped and writable; what becomes of the orbit by that is the case's question.
            unsafe { std::ptr::without_provenance_mut::<u32>(at).write_volatile(value) };
        }
    }
    std::process::abort()
}

/// Returns how many children of this process live.
fn living_children() -> usize {
    let own = std::process::id().to_string();
    let is_child = |stat: &str| {
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        !matches!(fields.next(), Some("Z" | "X") | None) && fields.next() == Some(own.as_str())
    };
    std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| std::fs::read_to_string(entry.unwrap().path().join("stat")).ok())
        .filter(|stat| is_child(stat))
        .count()
}

/// Bounds what a spare out of control can do to the machine: as a user of this case's own, where that is possible.
fn bound_processes() {
    if rustix::process::getuid().is_root() {
        let nobody_else = 70_000 + std::process::id() % 10_000_000;
        // SAFETY: changes who this process, which is the case's alone, is.
        assert_eq!(unsafe { libc::setresuid(nobody_else, nobody_else, nobody_else) }, 0);
        // SAFETY: an integer; /proc/self belongs to root otherwise.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) };
    } else {
        orrery_testing::skipped!("a bound on processes of the case's own: only root can become another user");
        return;
    }
    let resource = rustix::process::Resource::Nproc;
    let limit = rustix::process::Rlimit { current: Some(100), maximum: Some(100) };
    rustix::process::setrlimit(resource, limit).unwrap();
}

pub(crate) fn scribbling_over_all_shared_memory_makes_no_processes() {
    bound_processes();
    for word in (0..16).chain([50, 100, 1000, 1 << 31, u32::MAX, u32::MAX]) {
        let orbit = restarting(Orbit::builder("scribbler")).entry(|_| 7).create().unwrap();
        let bytes = word.to_ne_bytes();
        let limited = Call::new().function(scribble).arguments(&bytes).time_limit(Duration::from_secs(20));
        for round in 0..3 {
            assert!(orbit.call(&limited).is_err(), "{word}");
            assert_eq!(orbit.call(&Call::new()), Ok(7), "{word}, round {round}");
            let children = living_children();
            assert!(children <= 2, "{children} children after {word}, round {round}");
        }
        drop(orbit);
        assert!(childless(), "{} are left after {word}", living_children());
    }
}

pub(crate) fn an_orbit_cannot_write_to_the_memory_of_another() {
    bound_processes();
    let bystander = restarting(Orbit::builder("bystander")).entry(|_| 8).create().unwrap();
    let pid = bystander.pid().unwrap();
    let waiting = bystander.call_async(&Call::new()).unwrap();
    for word in [0, 1, 100, u32::MAX] {
        let orbit = restarting(Orbit::builder("scribbler")).entry(|_| 7).create().unwrap();
        let seen = orbit.call(&Call::new().function(|_| i64::try_from(shared_mappings().len()).unwrap()));
        // Its own queue (of which it can write its own side only) and control block, and the log of the checking mode.
        let is_checked = std::env::var_os("ORRERY_ORBIT_CHECK").is_some_and(|value| value == "1");
        assert_eq!(seen, Ok(2 + i64::from(is_checked)));
        let bytes: [u8; 4] = u32::to_ne_bytes(word);
        assert!(orbit.call(&Call::new().function(scribble).arguments(&bytes)).is_err());
        assert_eq!(orbit.call(&Call::new()), Ok(7));
        assert_eq!(bystander.call(&Call::new()), Ok(8));
    }
    assert_eq!(waiting.get(), Ok(8));
    assert_eq!((bystander.pid().unwrap(), bystander.restarts().unwrap()), (pid, 0));
}

/// How a task overwrites one word of what it shares with main.
const CHANGES: [fn(u32) -> u32; 9] = [
    |_| 0,
    |_| 1,
    |_| u32::MAX,
    |word| word ^ 1,
    |word| word ^ 2,
    |word| word ^ 3,
    |word| word.wrapping_add(1),
    |word| word.wrapping_sub(1),
    |word| word.wrapping_add(4),
];

/// Overwrites one word of the shared memory that is in use; the arguments say which, how, and whether to crash then. Returns
/// 1, or 0 where there is no such word.
fn overwrite(task: &mut Task<'_>) -> i64 {
    let [mapping, word, change, crashes]: [u32; 4] = task.argument().unwrap();
    let mut words: Vec<usize> = Vec::new();
    if let Some((start, end)) = shared_mappings().get(mapping as usize) {
        words.extend((*start..*end).step_by(4).take(128));
    }
    let Some(at) = words.get(word as usize) else { return 0 };
    let place = std::ptr::without_provenance_mut::<u32>(*at);
    // SAFETY: mapped and writable; what becomes of the orbit by that is the case's question.
    unsafe { place.write_volatile(CHANGES[change as usize](place.read_volatile())) };
    if crashes != 0 {
        std::process::abort();
    }
    1
}

/// A task that overwrites a single word, with a call that waits behind it: main gets an answer or an error for each, soon,
/// and the orbit works again.
pub(crate) fn whichever_word_is_overwritten_no_call_waits_for_ever() {
    const SOON: Duration = Duration::from_secs(15);
    let cores = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Core, cores).unwrap();
    let orbit = restarting(Orbit::builder("words")).queue(4).entry(|_| 7).create().unwrap();
    let mut tried = 0;
    for mapping in 0..2 {
        for word in 0..128 {
            for (change, crashes) in (0..9).flat_map(|change| [(change, 0), (change, 1)]) {
                let bytes: Vec<u8> =
                    [mapping, word, change, crashes].iter().flat_map(|n: &u32| n.to_ne_bytes()).collect();
                let what = format!("mapping {mapping}, word {word}, change {change}, crash {crashes}");
                let first = orbit.call_async(&Call::new().function(overwrite).arguments(&bytes)).unwrap();
                let second = orbit.call_async(&Call::new()).unwrap();
                let first = first.get_within(SOON);
                let is_late = |result: &Result<i64, _>| matches!(result, Err(Error::TimedOut { .. }));
                assert!(!is_late(&first), "{what}: the task: {first:?}");
                let second = second.get_within(SOON);
                assert!(!is_late(&second), "{what}: the call behind it: {second:?}");
                assert!(
                    second.as_ref().is_ok_and(|value| *value == 7) || second.is_err(),
                    "{what}: {second:?}"
                );
                // What was destroyed may show at the next call, but not for long.
                let mut last = Err(Error::NoEntry { orbit: String::new() });
                for _ in 0..3 {
                    last = orbit.call_async(&Call::new()).and_then(|call| call.get_within(SOON));
                    assert!(!is_late(&last), "{what}: the next call");
                    if last.is_ok() {
                        break;
                    }
                }
                assert_eq!(last, Ok(7), "{what}");
                tried += i32::from(first.is_err() || first == Ok(1));
            }
        }
    }
    assert!(tried >= 2000, "{tried} tried");
    drop(orbit);
    assert!(childless(), "{} are left", living_children());
}
