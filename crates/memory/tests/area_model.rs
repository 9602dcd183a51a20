//! Random work on areas, with companions that must see exactly what main had at each call.
//!
//! The companions are real forked processes. They answer each call with a hash of every range they were given and then
//! scribble over it, so that the next call has to find fresh pages.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test's helpers fail by panicking")]
#![expect(clippy::cast_possible_truncation, reason = "addresses fit 64 bits and random bytes may be cut")]

use core::alloc::Layout;
use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::ptr::NonNull;

use orrery_memory::PAGE;
use orrery_memory::area::{Area, AreaOptions, Delta, DeltaRef, Mirror, Mode, View, without_areas};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use xxhash_rust::xxh3::xxh3_64;

/// Bytes that an area of the test may have.
const CAPACITY: usize = 6 << 20;
/// What the size of a block is rounded to where it is asked what is in use.
const UNIT: usize = 8;
/// Ranges in one call.
const RANGES: usize = 4;

/// What a companion is told: the delta, a seed for scribbling, and ranges to look at.
type Call = [u64; 2 + 2 * RANGES];

fn bytes_at(address: u64, len: u64) -> &'static [u8] {
    if len == 0 {
        return &[];
    }
    // SAFETY: both sides only name areas, which stay mapped while a call is under way.
    unsafe { core::slice::from_raw_parts(core::ptr::with_exposed_provenance(address as usize), len as usize) }
}

/// Returns a companion's life. It allocates nothing: the test's process has other threads.
fn companion(mirror: &Mirror, mut line: &UnixStream) -> i32 {
    // SAFETY: this is a fresh child that refers to no area.
    let Ok(mut view) = (unsafe { View::attach(mirror) }) else { return 1 };
    let mut raw = [0_u8; size_of::<Call>()];
    while line.read_exact(&mut raw).is_ok() {
        let mut call: Call = [0; 2 + 2 * RANGES];
        for (word, bytes) in call.iter_mut().zip(raw.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().unwrap());
        }
        if view.refresh().is_err() || view.apply(&DeltaRef::from_bits(call[0])).is_err() {
            return 2;
        }
        let mut answer = [0_u8; 8 * RANGES];
        for (range, slot) in call[2..].chunks_exact(2).zip(answer.chunks_exact_mut(8)) {
            slot.copy_from_slice(&xxh3_64(bytes_at(range[0], range[1])).to_le_bytes());
        }
        let mut seed = call[1];
        for range in call[2..].chunks_exact(2).filter(|range| range[1] > 0) {
            for _ in 0..seed % 7 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = range[0] + seed % range[1];
                // SAFETY: as in `bytes_at`; the pages are this process' own copies.
                unsafe {
                    core::ptr::with_exposed_provenance_mut::<u8>(at as usize).write_volatile(seed as u8)
                };
            }
        }
        if line.write_all(&answer).is_err() {
            return 3;
        }
    }
    0
}

/// Main's side of a companion.
struct Watcher {
    mirror: Mirror,
    child: i32,
    line: UnixStream,
    queue: VecDeque<(Delta, Call, [u64; RANGES])>,
}

impl Watcher {
    fn start() -> Self {
        let mirror = Mirror::new().unwrap();
        let (child, line) = Self::fork(&mirror);
        Self { mirror, child, line, queue: VecDeque::new() }
    }

    fn fork(mirror: &Mirror) -> (i32, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(core::time::Duration::from_secs(60))).unwrap();
        // SAFETY: the child only does what `companion` says and ends.
        let child = without_areas(|| unsafe { libc::fork() }).unwrap();
        if child == 0 {
            // SAFETY: descriptors of the child alone; the other companions' lines must not stay open here.
            unsafe {
                libc::close(std::os::fd::AsRawFd::as_raw_fd(&ours));
                libc::_exit(companion(mirror, &theirs));
            }
        }
        assert!(child > 0);
        (child, ours)
    }

    fn call(&mut self, areas: &[&Area], queued: bool, seed: u64) {
        let mut call: Call = [0; 2 + 2 * RANGES];
        let mut seen = [xxh3_64(&[]); RANGES];
        for (index, area) in areas.iter().enumerate() {
            let (base, used) = (area.base() as u64, area.used() as u64);
            call[2 + 2 * index..][..2].copy_from_slice(&[base, used]);
            seen[index] = xxh3_64(bytes_at(base, used));
        }
        call[1] = seed;
        let idle = self.queue.is_empty() && !queued;
        let delta = if idle { self.mirror.deliver(areas) } else { self.mirror.capture(areas) }.unwrap();
        call[0] = delta.reference().to_bits();
        self.queue.push_back((delta, call, seen));
        if idle {
            self.step();
        }
    }

    /// Lets the companion run the oldest call.
    fn step(&mut self) {
        let Some((delta, call, seen)) = self.queue.pop_front() else { return };
        self.line.write_all(&call.map(u64::to_le_bytes).concat()).unwrap();
        let mut answer = [0_u8; 8 * RANGES];
        if let Err(error) = self.line.read_exact(&mut answer) {
            let mut status = 0;
            // SAFETY: a wait for our own child.
            unsafe { libc::waitpid(self.child, &raw mut status, 0) };
            panic!("the companion ended with status {status:#x}: {error}");
        }
        assert_eq!(
            answer,
            *seen.map(u64::to_le_bytes).concat(),
            "the companion saw something else than main had"
        );
        self.mirror.release(delta);
    }

    fn cancel_last(&mut self) {
        if let Some((delta, ..)) = self.queue.pop_back() {
            self.mirror.withdraw(delta).expect("nothing was captured after it");
        }
    }

    fn stop(&mut self) {
        // SAFETY: our own child, which is waited for.
        unsafe {
            libc::kill(self.child, libc::SIGKILL);
            libc::waitpid(self.child, core::ptr::null_mut(), 0);
        }
    }

    fn restart(&mut self) {
        self.stop();
        for (delta, ..) in self.queue.drain(..) {
            self.mirror.release(delta);
        }
        self.mirror.reset().unwrap();
        (self.child, self.line) = Self::fork(&self.mirror);
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop();
    }
}

#[derive(Clone, Debug)]
enum Op {
    Allocate { area: usize, size: usize, align: u8 },
    Resize { block: usize, size: usize },
    Free { block: usize },
    WriteBlock { block: usize, at: usize, len: usize },
    WriteRaw { area: usize, at: usize, len: usize },
    Drop { area: usize, at: usize, len: usize },
    SetUsed { area: usize, bytes: usize },
    Call { watcher: usize, areas: usize, queued: bool },
    Step { watcher: usize },
    Cancel { watcher: usize },
    Restart { watcher: usize },
    Replace { area: usize, elsewhere: bool },
}

fn op() -> impl Strategy<Value = Op> {
    let small = 0..8_usize;
    let len = prop_oneof![4 => 1..200_usize, 2 => 1..20_000_usize, 2 => 1..1_500_000_usize];
    prop_oneof![
        6 => (small.clone(), len.clone(), 0..14_u8).prop_map(|(area, size, align)| Op::Allocate { area, size, align }),
        2 => (any::<usize>(), len.clone()).prop_map(|(block, size)| Op::Resize { block, size }),
        3 => any::<usize>().prop_map(|block| Op::Free { block }),
        6 => (any::<usize>(), any::<usize>(), len.clone())
            .prop_map(|(block, at, len)| Op::WriteBlock { block, at, len }),
        6 => (small.clone(), any::<usize>(), len.clone()).prop_map(|(area, at, len)| Op::WriteRaw { area, at, len }),
        1 => (small.clone(), any::<usize>(), len).prop_map(|(area, at, len)| Op::Drop { area, at, len }),
        2 => (small.clone(), 0..CAPACITY).prop_map(|(area, bytes)| Op::SetUsed { area, bytes }),
        8 => (small.clone(), 0..16_usize, any::<bool>())
            .prop_map(|(watcher, areas, queued)| Op::Call { watcher, areas, queued }),
        5 => small.clone().prop_map(|watcher| Op::Step { watcher }),
        1 => small.clone().prop_map(|watcher| Op::Cancel { watcher }),
        1 => small.clone().prop_map(|watcher| Op::Restart { watcher }),
        1 => (small, any::<bool>()).prop_map(|(area, elsewhere)| Op::Replace { area, elsewhere }),
    ]
}

struct Block {
    area: usize,
    start: NonNull<u8>,
    layout: Layout,
}

struct World {
    heaps: Vec<Area>,
    raws: Vec<Area>,
    blocks: Vec<Block>,
    watchers: Vec<Watcher>,
    modes: [Mode; 2],
    stamp: u8,
}

/// Addresses outside of the arena that nothing else uses.
const ELSEWHERE: usize = 0x1000_0000_0000;

impl World {
    fn new(modes: [Mode; 2]) -> Self {
        let mut options = AreaOptions::default();
        options.capacity = CAPACITY;
        let make = |n: usize| {
            let mut options = options;
            options.mode = modes[n % 2];
            Area::new(n * 10_000, &options).unwrap()
        };
        let mut watchers = vec![Watcher::start()];
        let (heaps, raws) = ((0..2).map(make).collect(), (0..2).map(make).collect());
        watchers.push(Watcher::start());
        Self { heaps, raws, blocks: Vec::new(), watchers, modes, stamp: 0 }
    }

    fn fill(&mut self, start: NonNull<u8>, len: usize) {
        self.stamp = self.stamp.wrapping_add(1);
        // SAFETY: callers name memory of an area.
        unsafe { start.write_bytes(self.stamp, len) };
    }

    /// Checks what is said to be in use of a block and around it.
    fn check_block(&self, &Block { area, start, layout }: &Block) {
        let (area, start, size) =
            (&self.heaps[area], start.addr().get(), layout.size().next_multiple_of(UNIT));
        assert!(area.in_use(start, size), "{start:#x} of {size}");
        assert!(area.in_use(start + size - 1, 1) && area.in_use(start, 0));
        assert!(!area.in_use(start, size + 1), "what follows {start:#x} of {size}");
        assert!(!area.in_use(start - 1, 2), "what precedes {start:#x}");
    }

    fn work(&mut self, op: Op) {
        match op {
            Op::Allocate { area, size, align } => {
                let area = area % self.heaps.len();
                let layout = Layout::from_size_align(size, 1 << align).unwrap();
                let Ok(start) = self.heaps[area].allocate(layout) else { return };
                assert!(start.addr().get().is_multiple_of(layout.align()));
                assert!(bytes_at(start.addr().get() as u64, size as u64).iter().all(|byte| *byte == 0));
                self.fill(start, size.div_ceil(2));
                let block = Block { area, start, layout };
                self.check_block(&block);
                self.blocks.push(block);
            }
            Op::Resize { block, size } if !self.blocks.is_empty() => {
                let index = block % self.blocks.len();
                let Block { area, start, layout } = self.blocks[index];
                let kept = layout.size().min(size);
                let before = xxh3_64(bytes_at(start.addr().get() as u64, kept as u64));
                // SAFETY: the block is in the list, so it is in use.
                let Ok(start) = (unsafe { self.heaps[area].reallocate(start, layout, size) }) else { return };
                assert_eq!(xxh3_64(bytes_at(start.addr().get() as u64, kept as u64)), before);
                let layout = Layout::from_size_align(size, layout.align()).unwrap();
                self.blocks[index] = Block { area, start, layout };
                self.check_block(&self.blocks[index]);
            }
            Op::Free { block } if !self.blocks.is_empty() => {
                let block = self.blocks.swap_remove(block % self.blocks.len());
                // SAFETY: it was in the list, so it is in use, and now nobody knows it.
                unsafe { self.heaps[block.area].free(block.start, block.layout) };
                for at in [0, block.layout.size() / 2, block.layout.size() - 1] {
                    assert!(!self.heaps[block.area].in_use(block.start.addr().get() + at, 1));
                }
            }
            Op::WriteBlock { block, at, len } if !self.blocks.is_empty() => {
                let Block { start, layout, .. } = self.blocks[block % self.blocks.len()];
                // All that is in use may be overwritten, and the allocator is as before.
                let size = layout.size().next_multiple_of(UNIT);
                let at = at % size;
                // SAFETY: inside what the area has for the block.
                self.fill(unsafe { start.add(at) }, len.min(size - at));
            }
            Op::WriteRaw { area, at, len } => {
                let (start, there) = self.raws[area % self.raws.len()].raw().unwrap();
                if there > 0 {
                    let at = at % there;
                    // SAFETY: `at` is less than the `there` bytes that the area has in use from `start` on.
                    self.fill(unsafe { start.add(at) }, len.min(there - at));
                }
            }
            Op::Drop { area, at, len } => {
                let (start, there) = self.raws[area % self.raws.len()].raw().unwrap();
                if there >= PAGE {
                    let at = (at % there) & !(PAGE - 1);
                    let len = len.next_multiple_of(PAGE).min(there - at);
                    // SAFETY: `at` and `len` are whole pages inside the area's part in use, to which nothing
                    // refers.
                    let dropped =
                        unsafe { libc::madvise(start.as_ptr().add(at).cast(), len, libc::MADV_DONTNEED) };
                    assert_eq!(dropped, 0);
                }
            }
            Op::SetUsed { area, bytes } => {
                let area = &self.raws[area % self.raws.len()];
                area.set_used(bytes).unwrap();
                assert_eq!(area.used(), bytes);
            }
            Op::Call { watcher, areas, queued } => {
                let chosen: Vec<&Area> = self
                    .heaps
                    .iter()
                    .chain(&self.raws)
                    .enumerate()
                    .filter_map(|(index, area)| (areas >> index & 1 == 1).then_some(area))
                    .collect();
                let count = self.watchers.len();
                self.watchers[watcher % count].call(
                    &chosen,
                    queued,
                    areas as u64 * 31 + u64::from(self.stamp),
                );
            }
            Op::Step { watcher } => self.watcher(watcher).step(),
            Op::Cancel { watcher } => self.watcher(watcher).cancel_last(),
            Op::Restart { watcher } => self.watcher(watcher).restart(),
            Op::Replace { area, elsewhere } => {
                // Queued calls name the old area; its pages stay in the mirrors until a new one takes the place.
                self.watchers.iter_mut().for_each(|watcher| {
                    while !watcher.queue.is_empty() {
                        watcher.step()
                    }
                });
                let mut options = AreaOptions::default();
                options.capacity = CAPACITY;
                options.mode = self.modes[area % 2];
                let index = area / 2 % 2;
                if area % 2 == 0 {
                    self.blocks.retain(|block| block.area != index);
                    self.heaps[index] = Area::new(0, &options).unwrap();
                } else {
                    if elsewhere {
                        options.address = (0..100)
                            .map(|n| ELSEWHERE + n * CAPACITY)
                            .find(|address| Area::containing(*address as *const u8).is_none());
                    }
                    self.raws[index] = Area::new(5_000, &options).unwrap();
                }
            }
            _ => {}
        }
    }

    fn watcher(&mut self, number: usize) -> &mut Watcher {
        let count = self.watchers.len();
        &mut self.watchers[number % count]
    }
}

/// Operations, some of them again and again: pages that are written before every call are treated as such.
fn program() -> impl Strategy<Value = Vec<Op>> {
    let rounds = (prop::collection::vec(op(), 1..8), 3..9_usize);
    let rounds = rounds.prop_map(|(round, times)| vec![round; times].concat());
    let piece = prop_oneof![20 => op().prop_map(|op| vec![op]), 1 => rounds];
    prop::collection::vec(piece, 1..100).prop_map(|pieces| pieces.concat())
}

fn run(modes: [Mode; 2]) {
    let cases = std::env::var("ORRERY_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(24);
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(&program(), |ops| {
            let mut world = World::new(modes);
            ops.into_iter().for_each(|op| world.work(op));
            world.watchers.iter_mut().for_each(|watcher| {
                while !watcher.queue.is_empty() {
                    watcher.step()
                }
            });
            Ok(())
        })
        .unwrap();
}

/// Runs a test of this program under another tracker.
fn under(tracker: &str, test: &str) {
    let done = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env("ORRERY_TRACKER", tracker)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(
        done.status.success() && said.contains("1 passed"),
        "{said}\n{}",
        String::from_utf8_lossy(&done.stderr)
    );
}

#[test]
fn companions_see_what_main_had() {
    run([Mode::Copy, Mode::Copy]);
}

#[test]
fn and_so_they_do_when_contents_are_compared() {
    under("compare", "companions_see_what_main_had");
}

#[test]
fn copiers_copy_what_main_had() {
    run([Mode::Cow, Mode::Auto]);
}

#[test]
fn and_so_they_do_for_those_who_compare() {
    under("compare", "copiers_copy_what_main_had");
}
