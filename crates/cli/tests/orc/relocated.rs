//! Relocated data of libraries, which are in the same place in every program.

use std::fs;
use std::path::Path;

use crate::guest::{Guest, TALK, Workshop};
use crate::unmodified::{PYTHON, Python, run};
use crate::{Store, eventually, signal};
use orrery_testing::Killed;

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
    let is_it = |line: &Line| line.name.contains("orc:relocated") || line.name.contains("orc:prelinked");
    maps(pid).into_iter().filter(is_it).collect()
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
    // Pages with pointers to what is elsewhere are each one's own; the others are the same.
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
    // So does one that is started again, with the same secret.
    let directory = store.path().to_owned();
    drop(three);
    let secret = fs::read(crate::secret(&directory)).unwrap();
    assert_eq!(secret.len(), 32);
    let kept = tempfile::tempdir().unwrap();
    let path = kept.path().join("secret");
    fs::copy(crate::secret(&directory), &path).unwrap();
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
    // Unloaded and loaded again, with something else loaded in between, it is where it lay.
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
        let child = Killed(child);
        eventually("the exchange", || {
            let lines = maps(child.0.id());
            lines.iter().any(|line| line.access == "r-xp" && line.name.contains("orc:sleep"))
        });
        // Given to the store once, and so are writable pages that nobody has written.
        let mappings = orrery_orc_store::measure::mappings(i32::try_from(child.0.id()).unwrap()).unwrap();
        drop(child);
        let own: Vec<_> = mappings.iter().filter(|area| area.name.contains("/sleep")).collect();
        assert!(own.iter().all(|area| area.resident == area.anonymous), "{kernel}: {own:?}");
    }
}

/// A library with much relocated data, whose headers do not tell which number is in them.
fn alike(number: i32) -> String {
    let symbols: String = (0..120).map(|n| format!("int padding{n}(void) {{ return {n}; }}\n")).collect();
    format!(
        "{symbols}
         const int numbers[4] = {{0, 1, 2, 3}};
         const char length[300000] = {{1}};
         const int *const table[8192] = {{[0 ... 8191] = &numbers[{number}]}};
         int answer(void) {{
             long sum = 0;
             for (int i = 0; i < 8192; i++) sum += *table[i];
             return sum / 8192;
         }}"
    )
}

#[test]
fn libraries_that_look_alike_are_told_apart_by_their_bytes() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let build = |name: &str, number: i32| workshop.library(name, &alike(number), &["-Wl,--build-id=none"]);
    let libraries = [build("libone.so", 1), build("libtwo.so", 2)];
    let [one, two] = libraries.each_ref().map(|path| fs::read(path).unwrap());
    assert!(one.len() == two.len() && one[..2048] == two[..2048] && one != two, "one place for both");
    let other = workshop.library("libother.so", "int other(void) { return 7; }", &[]);
    let source = format!(
        "{TALK}
         int main(int count, char **paths) {{
             int (*answers[4])(void), sum = 0;
             for (int i = 1; i < count; i++) answers[i] = dlsym(load(paths[i]), \"answer\");
             /* After which the relocated data of those before are shared. */
             load(\"{}\");
             for (int i = 1; i < count; i++) sum = 10 * sum + answers[i]();
             say(sum); hear();
         }}",
        other.display()
    );
    let program = workshop.program("main", &source, &[]);
    let [program, one, two] = [&program, &libraries[0], &libraries[1]].map(|path| path.to_str().unwrap());
    let start = |libraries: &[&str]| {
        let mut guest = Guest::spawn(run(&store, &[&[program], libraries].concat()), &workshop);
        (guest.number(), guest)
    };
    let place = |guest: &Guest, name: &str| {
        let lines = maps(guest.pid());
        let line = lines.iter().find(|line| line.access == "r-xp" && line.name.contains(name));
        line.unwrap_or_else(|| panic!("{name}: {lines:#?}")).range.clone()
    };
    let (first, of_one) = start(&[one]);
    let (second, of_two) = start(&[two]);
    assert_eq!((first, second), (1, 2));
    assert_eq!(place(&of_one, "libone.so"), place(&of_two, "libtwo.so"), "they are one to the book");
    // Those that come later are the same again, and share what they have with the like of them only.
    for _ in 0..2 {
        let (number, again) = start(&[one]);
        assert_eq!(number, 1);
        assert!(!relocated(again.pid()).is_empty() || relocated(of_one.pid()).is_empty());
        assert_eq!(start(&[two]).0, 2);
    }
    // In one program one of them is elsewhere.
    for (both, expected) in [([one, two], 12), ([two, one], 21)] {
        let (number, guest) = start(&both);
        assert_eq!(number, expected);
        assert_ne!(place(&guest, "libone.so"), place(&guest, "libtwo.so"));
    }
}

/// A program that reads all pointers of a library, and calls a function that one of them leads to; each library has a number.
fn reader(workshop: &Workshop, numbers: &[i32]) -> std::path::PathBuf {
    for number in numbers {
        let directory = workshop.path(&number.to_string());
        fs::create_dir(&directory).unwrap();
        let source = format!("#include <stdio.h>\n#include <stdlib.h>\n{}\n", alike(*number))
            + "int (*const outside[])(int) = {abs, putchar};
               char *const inside[2] = {(char *)length, (char *)table};
               static int own = 5;
               int *const writable[600] = {[0 ... 599] = &own};
               int mixed(void) { return outside[0](-1) + *writable[599] + *inside[0] - 7; }
               __attribute__((constructor)) static void begin(void) { own = 5; }";
        let path = workshop.library("libread.so", &source, &["-Wl,--build-id=none", "-Wl,-z,now"]);
        fs::rename(path, directory.join("libread.so")).unwrap();
    }
    let source = format!(
        "{TALK} int answer(void), mixed(void);
         int main(void) {{ say(10 * answer() + mixed()); hear(); say(10 * answer() + mixed()); hear(); }}"
    );
    let directory = workshop.path(&numbers[0].to_string());
    let options = ["-L", directory.to_str().unwrap(), "-lread"];
    workshop.program("reader", &source, &options)
}

/// The mapping of what the store has prepared, and how many bytes of it are the program's own.
fn prepared(pid: u32) -> Option<(String, u64)> {
    let mappings = orrery_orc_store::measure::mappings(i32::try_from(pid).unwrap()).unwrap();
    let area = mappings.into_iter().find(|area| area.name.contains("orc:prelinked"))?;
    Some((area.access, area.anonymous))
}

#[test]
fn what_was_prepared_is_not_written_again() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let program = reader(&workshop, &[1]);
    let start = |variable: (&str, &str)| {
        let mut command = run(&store, &[program.to_str().unwrap()]);
        command.env("LD_LIBRARY_PATH", workshop.path("1")).env(variable.0, variable.1);
        let mut guest = Guest::spawn(command, &workshop);
        assert_eq!(guest.number(), 10);
        assert_eq!(guest.go_on(), 10, "and again");
        guest
    };
    // The first program shows the library to the store.
    let first = start(("FIRST", "1"));
    let variables =
        [("FIRST", ""), ("LD_BIND_NOW", "1"), ("ORRERY_ORC_KERNEL", "old"), ("LD_DEBUG", "unused")];
    for variable in variables {
        let guest = start(variable);
        let Some((access, own)) = prepared(guest.pid()) else {
            panic!("{variable:?}: {:#?}", maps(guest.pid()));
        };
        assert!(access == "r--p" && own == 0, "{variable:?}: {access}, {own} bytes are its own");
        let place = |pid: u32| {
            maps(pid).into_iter().find(|line| line.access == "r-xp" && line.name.contains("libread"))
        };
        assert_eq!(place(guest.pid()), place(first.pid()));
    }
    // Without a place there is nothing that was prepared for it.
    let guest = start(("ORRERY_ORC_PLACES", "none"));
    assert_eq!(prepared(guest.pid()), None);
}

#[test]
fn libraries_that_look_alike_have_their_own_data_prepared() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let program = reader(&workshop, &[1, 2]);
    let [one, two] =
        ["1", "2"].map(|directory| fs::read(workshop.path(directory).join("libread.so")).unwrap());
    assert!(one.len() == two.len() && one[..2048] == two[..2048] && one != two, "one place for both");
    let mut had = 0;
    for number in [1, 2, 1, 2, 2, 1] {
        let mut command = run(&store, &[program.to_str().unwrap()]);
        command.env("LD_LIBRARY_PATH", workshop.path(&number.to_string()));
        let mut guest = Guest::spawn(command, &workshop);
        assert_eq!(guest.number(), 10 * number);
        had += i32::from(prepared(guest.pid()).is_some());
    }
    assert!(had > 0, "one of them");
}
