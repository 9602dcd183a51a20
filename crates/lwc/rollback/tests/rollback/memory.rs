//! Memory comes back, and what a program does between runs stays.

use std::ffi::c_void;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use orrery_rollback::{KeptBuffer, Outcome, Rollback};

use super::common::{map, open_descriptors, rollback, tell};

pub(crate) fn memory_comes_back() {
    static GLOBAL: AtomicU32 = AtomicU32::new(1);
    let mut heap = vec![1_u8; 3_000_000];
    let mut local = 5_u64;
    let kept = KeptBuffer::with_capacity(100).unwrap();
    let mut rollback = rollback();
    for _ in 0..5 {
        let outcome = rollback.run(|| {
            heap.fill(2);
            heap.push(3);
            local += 1;
            GLOBAL.store(9, Ordering::Relaxed);
            tell(&kept, &format!("{} {local} {}\n", heap.len(), GLOBAL.load(Ordering::Relaxed)));
        });
        assert_eq!(outcome, Ok(Outcome::Returned));
        assert!(heap.iter().all(|&byte| byte == 1) && heap.len() == 3_000_000);
        assert_eq!((local, GLOBAL.load(Ordering::Relaxed)), (5, 1));
    }
    assert_eq!(kept.bytes(), b"3000001 6 9\n".repeat(5));
}

pub(crate) fn what_the_program_does_between_runs_stays() {
    let mut rollback = rollback();
    let mut numbers = Vec::new();
    for number in 0..200_u32 {
        numbers.push(vec![number; 100 + 50 * number as usize]);
        rollback.run(|| numbers.clear()).unwrap();
    }
    for (number, vector) in (0_u32..).zip(&numbers) {
        assert_eq!(*vector, vec![number; 100 + 50 * number as usize]);
    }
    assert_eq!(numbers.len(), 200);
}

pub(crate) fn dropped_memory_comes_back() {
    let length = 8 << 20;
    let a = map(length);
    // SAFETY: a part of the test's own mapping, to which nothing else refers.
    unsafe { a.write_bytes(1, length) };
    // The data of the C library and of this program: private mappings of files.
    let mut rollback = rollback();
    for _ in 0..3 {
        // SAFETY: nothing lives in the mapping. That the C library loses its data, too, may end the run, and is undone.
        let outcome = rollback.run(|| unsafe {
            libc::madvise(a.cast(), length, libc::MADV_DONTNEED);
            for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
                if line.contains("libc.so") && line.contains("rw-p") {
                    let (start, rest) = line.split_once('-').unwrap();
                    let end = rest.split(' ').next().unwrap();
                    let start = usize::from_str_radix(start, 16).unwrap();
                    let end = usize::from_str_radix(end, 16).unwrap();
                    let pointer: *mut c_void = std::ptr::with_exposed_provenance_mut(start);
                    libc::syscall(libc::SYS_madvise, pointer, end - start, libc::MADV_DONTNEED);
                }
            }
        });
        // Without its data the C library may well have crashed.
        assert!(matches!(outcome, Ok(Outcome::Returned | Outcome::Signaled { .. })), "{outcome:?}");
        // SAFETY: a part of the test's own mapping, to which nothing else refers.
        assert!(unsafe { std::slice::from_raw_parts(a, length) }.iter().all(|&byte| byte == 1));
        assert_eq!(format!("{:5.2}", std::hint::black_box(1.5)), " 1.50");
    }
}

pub(crate) fn huge_pages_come_back() {
    let length = 16 << 20;
    let a = map(length);
    // SAFETY: within the mapping, in which nothing lives.
    unsafe {
        libc::madvise(a.cast(), length, libc::MADV_HUGEPAGE);
        a.write_bytes(1, length);
    }
    let mut rollback = rollback();
    for _ in 0..3 {
        rollback
            // SAFETY: within the mapping, in which nothing lives.
            .run(|| unsafe {
                a.add(5 << 20).write(7);
                a.add(9 << 20).write_bytes(8, 3 << 20);
                libc::madvise(a.cast(), 4 << 20, libc::MADV_DONTNEED);
            })
            .unwrap();
        // SAFETY: a part of the test's own mapping, to which nothing else refers.
        assert!(unsafe { std::slice::from_raw_parts(a, length) }.iter().all(|&byte| byte == 1));
    }
}

pub(crate) fn a_large_process_is_held() {
    let length = 400 << 20;
    let memory = map(length);
    // SAFETY: a part of the test's own mapping, to which nothing else refers.
    unsafe { memory.write_bytes(1, length) };
    let mut rollback = rollback();
    for round in 0..3_u8 {
        rollback
            // SAFETY: a part of the test's own mapping, to which nothing else refers.
            .run(|| unsafe {
                for page in (0..length).step_by(1 << 20) {
                    memory.add(page + 4096 * round as usize).write(9);
                }
            })
            .unwrap();
        // SAFETY: a part of the test's own mapping, to which nothing else refers.
        assert!(unsafe { std::slice::from_raw_parts(memory, length) }.iter().all(|&byte| byte == 1));
    }
    let (statistics, restored) = rollback.statistics().unwrap();
    assert!(restored.copied >= 400);
    if rollback.mechanisms().unwrap().0 == "wp_async" {
        assert!(statistics.image_bytes < 100 << 20, "most pages stay where they are: {statistics:?}");
    }
}

/// A first snapshot commits shared memory for what it stores, and for no more than as much again.
pub(crate) fn a_first_snapshot_commits_what_it_uses() {
    let mut rollback = rollback();
    let mut number = 1;
    rollback.run(|| number = 2).unwrap();
    assert_eq!(number, 1);
    let (statistics, _) = rollback.statistics().unwrap();
    let committed = committed_files();
    let most = 2 * statistics.images * 4096 + (256 << 10);
    assert!(committed > 0 && committed <= most, "{committed} bytes, and {statistics:?}");
}

/// Returns how much memory the files in memory have that this process has open.
fn committed_files() -> usize {
    let mut blocks = 0;
    for (number, target) in open_descriptors() {
        if target.starts_with("/memfd:") {
            // SAFETY: all-zero is a stat, which the call writes.
            let mut found: libc::stat = unsafe { std::mem::zeroed() };
            // SAFETY: all-zero is a valid stat, which the call overwrites.
            assert_eq!(unsafe { libc::fstat(number, &raw mut found) }, 0);
            blocks += usize::try_from(found.st_blocks).unwrap();
        }
    }
    blocks * 512
}

pub(crate) fn hidden_images_work() {
    use orrery_memory::images::Visibility;
    let mut rollback = Rollback::builder().visibility(Visibility::Hidden).build().unwrap();
    let mut heap = vec![1_u8; 1_000_000];
    for _ in 0..3 {
        rollback.run(|| heap.fill(2)).unwrap();
        assert!(heap.iter().all(|&byte| byte == 1));
    }
}

pub(crate) fn scattered_pages_come_back() {
    let length = 64 << 20;
    let memory = map(length);
    // SAFETY: a part of the test's own mapping, to which nothing else refers.
    unsafe { memory.write_bytes(1, length) };
    let mut rollback = rollback();
    for step in [8192, 12288, 4096] {
        rollback
            .run(|| {
                for at in (0..length).step_by(step) {
                    // SAFETY: a part of the test's own mapping, to which nothing else refers.
                    unsafe { memory.add(at).write(2) };
                }
            })
            .unwrap();
        // SAFETY: a part of the test's own mapping, to which nothing else refers.
        assert!(unsafe { std::slice::from_raw_parts(memory, length) }.iter().all(|&byte| byte == 1));
    }
}

/// Puts this process into a control group of its own whose memory can be squeezed, or says why not.
fn squeeze(bytes: u64) -> Result<impl Drop, String> {
    struct Group(std::path::PathBuf);
    impl Drop for Group {
        fn drop(&mut self) {
            let _ =
                std::fs::write(self.0.parent().unwrap().join("cgroup.procs"), std::process::id().to_string());
            let _ = std::fs::remove_dir(&self.0);
        }
    }
    let group = std::path::PathBuf::from(format!("/sys/fs/cgroup/memory/orrery-test-{}", std::process::id()));
    std::fs::create_dir(&group).map_err(|error| format!("no control group: {error}"))?;
    let made = Group(group.clone());
    let write = |file: &str, text: String| {
        std::fs::write(group.join(file), text).map_err(|error| format!("{file}: {error}"))
    };
    write("cgroup.procs", std::process::id().to_string())?;
    write("memory.limit_in_bytes", bytes.to_string())?;
    Ok(made)
}

pub(crate) fn freed_pages_come_back() {
    let length = 32 << 20;
    let memory = map(length);
    // SAFETY: a part of the test's own mapping, to which nothing else refers.
    unsafe { memory.write_bytes(1, length) };
    let mut rollback = rollback();
    // SAFETY: advice about the mapping, in which nothing lives.
    rollback.run(|| assert_eq!(unsafe { libc::madvise(memory.cast(), length, libc::MADV_FREE) }, 0)).unwrap();
    // Pages that are still marked would be taken now.
    match squeeze(256 << 20) {
        Ok(_group) => {
            let pressure = map(400 << 20);
            for at in (0..400 << 20).step_by(4096) {
                // SAFETY: within the mapping, in which nothing lives.
                unsafe {
                    pressure.add(at).write(1);
                    if at % (64 << 20) == 0 && at > 0 {
                        libc::madvise(pressure.add(at - (64 << 20)).cast(), 64 << 20, libc::MADV_DONTNEED);
                    }
                }
            }
        }
        Err(reason) => orrery_testing::skipped!("pressure: {reason}"),
    }
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let marked = rollup.lines().find_map(|line| line.strip_prefix("LazyFree:")).unwrap().trim().to_owned();
    assert_eq!(marked, "0 kB");
    // SAFETY: a part of the test's own mapping, to which nothing else refers.
    assert!(unsafe { std::slice::from_raw_parts(memory, length) }.iter().all(|&byte| byte == 1));
    assert_eq!(rollback.run(|| {}), Ok(Outcome::Returned));
    // SAFETY: a part of the test's own mapping, to which nothing else refers.
    assert!(unsafe { std::slice::from_raw_parts(memory, length) }.iter().all(|&byte| byte == 1));
}

pub(crate) fn swapped_pages_come_back() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("swap");
    let made = Command::new("sh")
        .arg("-c")
        .arg(format!(
            "dd if=/dev/zero of={0} bs=1M count=48 && chmod 600 {0} && mkswap {0} && swapon {0}",
            path.display()
        ))
        .output()
        .unwrap();
    if !made.status.success() {
        orrery_testing::skipped!("no swap: {}", String::from_utf8_lossy(&made.stderr));
        return;
    }
    let length = 24 << 20;
    let memory = map(length);
    // SAFETY: a part of the test's own mapping, to which nothing else refers.
    unsafe { memory.write_bytes(1, length) };
    let mut rollback = rollback();
    // SAFETY: advice about the mapping that changes no contents.
    let out = |from: usize, length: usize| unsafe {
        libc::madvise(memory.add(from).cast(), length, libc::MADV_PAGEOUT)
    };
    rollback.run(|| {}).unwrap();
    // Clean pages go out and come back as they were; dirty ones go out dirty and are restored all the same.
    out(0, 8 << 20);
    let run = rollback.run(|| {
        // SAFETY: a part of the test's own mapping, to which nothing else refers.
        unsafe { memory.add(4 << 20).write_bytes(2, 12 << 20) };
        out(4 << 20, 12 << 20);
        out(20 << 20, 2 << 20);
    });
    let swapped = std::fs::read_to_string("/proc/swaps").unwrap();
    // SAFETY: a part of the test's own mapping, to which nothing else refers.
    let same = unsafe { std::slice::from_raw_parts(memory, length) }.iter().all(|&byte| byte == 1);
    let again = rollback.run(|| {});
    let _ = Command::new("swapoff").arg(&path).status();
    println!("{swapped}");
    assert_eq!((run, same, again), (Ok(Outcome::Returned), true, Ok(Outcome::Returned)));
}

fn set_ksm(file: &str, text: &str) -> std::io::Result<()> {
    std::fs::write(format!("/sys/kernel/mm/ksm/{file}"), text)
}

/// Leaves KSM as it was found, also where the test fails: it would colour everybody's numbers.
struct Ksm {
    run: String,
    pages_to_scan: String,
    _one_at_a_time: std::fs::File,
}

impl Drop for Ksm {
    fn drop(&mut self) {
        let _ = set_ksm("run", self.run.trim());
        let _ = set_ksm("pages_to_scan", self.pages_to_scan.trim());
    }
}

pub(crate) fn merged_pages_come_back() {
    let Ok(switch) = std::fs::File::open("/sys/kernel/mm/ksm/run") else {
        orrery_testing::skipped!("no KSM here");
        return;
    };
    // With another tracker this runs at the same time, and would find KSM as that one has set it.
    switch.lock().unwrap();
    let run = std::fs::read_to_string("/sys/kernel/mm/ksm/run").unwrap();
    let pages_to_scan = std::fs::read_to_string("/sys/kernel/mm/ksm/pages_to_scan").unwrap();
    let _as_found = Ksm { run, pages_to_scan, _one_at_a_time: switch };
    if set_ksm("pages_to_scan", "20000").and_then(|()| set_ksm("run", "1")).is_err() {
        orrery_testing::skipped!("KSM may not be switched on");
        return;
    }
    let length = 8 << 20;
    let memory = map(length);
    // SAFETY: within the mapping; the advice changes no contents.
    unsafe {
        memory.write_bytes(1, length);
        libc::madvise(memory.cast(), length, libc::MADV_MERGEABLE);
    }
    let mut rollback = rollback();
    for _ in 0..10 {
        rollback
            .run(|| {
                std::thread::sleep(Duration::from_millis(60));
                // SAFETY: a part of the test's own mapping, to which nothing else refers.
                unsafe { memory.add(1 << 20).write_bytes(2, 1 << 20) };
            })
            .unwrap();
        // SAFETY: a part of the test's own mapping, to which nothing else refers.
        assert!(unsafe { std::slice::from_raw_parts(memory, length) }.iter().all(|&byte| byte == 1));
    }
    println!("merged: {}", std::fs::read_to_string("/sys/kernel/mm/ksm/pages_sharing").unwrap());
}
