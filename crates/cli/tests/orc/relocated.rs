//! Relocated data of libraries, which lie in the same place in every program.

use std::fs;
use std::path::Path;

use crate::unmodified::{PYTHON, Python, Running, run};
use crate::{Store, eventually, signal};

/// A line of `/proc/PID/maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    range: String,
    access: String,
    inode: String,
    name: String,
}

fn maps(pid: u32) -> Vec<Line> {
    let text = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    text.lines()
        .map(|line| {
            let mut words = line.split_whitespace().map(str::to_owned);
            let mut next = || words.next().unwrap_or_default();
            let (range, access, _, _, inode, name) = (next(), next(), next(), next(), next(), next());
            Line { range, access, inode, name }
        })
        .collect()
}

/// The code of OpenSSL's library, which has much relocated data.
fn code(pid: u32) -> Option<Line> {
    maps(pid).into_iter().find(|line| line.access == "r-xp" && line.name.contains("libcrypto.so"))
}

fn relocated(pid: u32) -> Vec<Line> {
    maps(pid).into_iter().filter(|line| line.name.contains("orc:relocated")).collect()
}

/// Loads the library, and something else, after which what the first was relocated to is shared.
fn load(python: &mut Python) -> bool {
    python.ask("import ssl, _json, _bisect; print(len(ssl.OPENSSL_VERSION) > 3)") == "True"
}

fn is_here() -> bool {
    let there = Path::new(PYTHON).exists()
        && std::process::Command::new(PYTHON)
            .args([
                "-c",
                "import ssl; print(any('libcrypto.so' in line for line in open('/proc/self/maps')))",
            ])
            .output()
            .is_ok_and(|output| output.stdout == b"True\n");
    if !there {
        orrery_testing::skipped!("there is no {PYTHON} with OpenSSL's shared library");
    }
    there
}

#[test]
fn relocated_data_are_in_memory_once() {
    if !is_here() {
        return;
    }
    let store = Store::new(&[]);
    let _ = store.client();
    let (mut one, mut two) = (Python::start(&store), Python::start(&store));
    assert!(load(&mut one) && load(&mut two));
    assert_eq!(code(one.pid()), code(two.pid()), "the same place");
    let (first, second) = (relocated(one.pid()), relocated(two.pid()));
    assert!(!first.is_empty() && first.iter().all(|line| line.access == "r--p"), "{first:?}");
    // Pages with pointers to what lies elsewhere are each one's own; the others are the same.
    let begins = |line: &Line| (line.range.split('-').next().map(str::to_owned), line.inode.clone());
    let shared: Vec<_> = second.iter().map(begins).collect();
    assert!(first.iter().map(begins).any(|begin| shared.contains(&begin)), "{first:?} {second:?}");
    // What it is for still works, and so does what looks at it.
    let digest = "import hashlib; print(hashlib.new('sha256', b'x').hexdigest()[:8])";
    assert_eq!((one.ask(digest), two.ask(digest)), ("2d711642".to_owned(), "2d711642".to_owned()));
    // A store that is killed finds the places again.
    let place = code(one.pid()).unwrap().range;
    let server = store.server();
    signal(server, libc::SIGKILL);
    eventually("a new store", || store.server() != server);
    let mut three = Python::start(&store);
    assert!(load(&mut three));
    assert_eq!(code(three.pid()).unwrap().range, place);
    // So does one that is started anew, with the same secret.
    let folder = store.path().to_owned();
    drop(three);
    let secret = fs::read(folder.join("secret")).unwrap();
    assert_eq!(secret.len(), 32);
    let kept = tempfile::tempdir().unwrap();
    let path = kept.path().join("secret");
    fs::copy(folder.join("secret"), &path).unwrap();
    let same = Store::new(&["--secret", path.to_str().unwrap()]);
    let _ = same.client();
    let mut five = Python::start(&same);
    assert!(load(&mut five));
    assert_eq!(code(five.pid()).unwrap().range, place, "the same secret, another store");
    // Another store has other places.
    let other = Store::new(&[]);
    let _ = other.client();
    let mut four = Python::start(&other);
    assert!(load(&mut four));
    assert_ne!(code(four.pid()).unwrap().range, place, "one in 67 million");
}

#[test]
fn nothing_is_left_of_making_room() {
    if !is_here() {
        return;
    }
    let store = Store::new(&[]);
    let _ = store.client();
    let mut python = Python::start(&store);
    let path = python.ask(
        "import ssl; print([l.split()[5] for l in open('/proc/self/maps') if 'orc:libcrypto.so' in l][0])",
    );
    assert!(path.contains("libcrypto"), "{path}");
    let size = |pid: u32| -> u64 {
        let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = text.lines().find(|line| line.starts_with("VmSize:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    assert!(size(python.pid()) < 4 << 20, "KiB; the room took more");
    // Unloaded and loaded again, with something else loaded in between, it lies where it lay.
    let mut python = Python::start(&store);
    python.ask("import ctypes, _ctypes; print(1)");
    let mut seen = Vec::new();
    for _ in 0..3 {
        python.ask("h = ctypes.CDLL('libcrypto.so.3')._handle; print(h > 0)");
        seen.push(code(python.pid()).unwrap().range);
        assert_eq!(python.ask("print(_ctypes.dlclose(h))"), "None");
    }
    assert!(seen.iter().all(|range| *range == seen[0]), "{seen:?}");
    assert!(size(python.pid()) < 4 << 20);
    // Where no such room can be made, programs run as ever.
    let command = ["sh", "-c", "ulimit -v 2000000; exec \"$0\" \"$@\"", PYTHON];
    let mut python = Python::start_with(&store, &command);
    assert!(load(&mut python));
    assert_ne!(code(python.pid()).unwrap().range, seen[0]);
    // Nor where the place is taken.
    let mut python = Python::start(&store);
    let (start, end) = seen[0].split_once('-').unwrap();
    let take = format!(
        "import ctypes; m = ctypes.CDLL(None).mmap; m.restype = ctypes.c_void_p; \
         print(m(ctypes.c_void_p(0x{start}), ctypes.c_size_t(0x{end} - 0x{start}), 0, 0x100022, -1, 0) == 0x{start})"
    );
    assert_eq!(python.ask(&take), "True");
    assert!(load(&mut python));
    assert_ne!(code(python.pid()).unwrap().range, seen[0]);
}

#[test]
fn files_own_pages_are_needed_no_more() {
    let store = Store::new(&[]);
    let _ = store.client();
    for kernel in ["new", "old"] {
        let tree = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let program = tree.path().join("sleep");
        orrery_testing::copy_program("/bin/sleep", &program);
        let child = run(&store, &[program.to_str().unwrap(), "1000"])
            .env("ORRERY_ORC_KERNEL", kernel)
            .spawn()
            .unwrap();
        let child = Running(child);
        eventually("the exchange", || {
            let lines = maps(child.0.id());
            lines.iter().any(|line| line.access == "r-xp" && line.name.contains("orc:sleep"))
        });
        // Given to the store once, and so are writable pages that nobody has written.
        let areas = orrery_orc::measure::areas(i32::try_from(child.0.id()).unwrap()).unwrap();
        drop(child);
        let own: Vec<_> = areas.iter().filter(|area| area.name.contains("/sleep")).collect();
        assert!(own.iter().all(|area| area.resident == area.anonymous), "{kernel}: {own:?}");
    }
}
