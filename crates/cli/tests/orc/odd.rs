//! Programs and libraries of odd shapes: what can be shared is, the rest is left alone, works, and `orrery orc explain` says why.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use object::{Object as _, ObjectSection as _};

use crate::Store;
use crate::guest::{Guest, TALK, Workshop};
use crate::unmodified::run;

const AN_OBJECT: &str = "an object: one copy for all";
const CHANGED: &str = "code that was changed in memory";

/// Returns whether the file of this name is an object in the process' memory.
fn is_shared(guest: &Guest, name: &str) -> bool {
    guest
        .explain()
        .iter()
        .any(|row| row.name.contains(name) && row.access == "r-xp" && row.reason == AN_OBJECT)
}

/// Code with an address in it, which the loader puts there, and other pages of code.
const WITH_ADDRESS: &str = "
__attribute__((used)) static int value = 42;
__asm__(\".text\\n.skip 65536, 0x90\\ntable: .quad value\\n.skip 65536, 0x90\\n\");
extern int *const table __attribute__((visibility(\"hidden\")));
int answer(void) { return *table; }
";

#[test]
fn text_relocations_stay_and_the_other_code_is_shared() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    workshop.library("libaddress.so", WITH_ADDRESS, &["-Wl,-z,notext"]);
    let linked = format!("{TALK} int answer(void); int main(void) {{ say(answer()); hear(); }}");
    let linked = workshop.program("linked", &linked, &["-L$LIB", "-laddress", "-Wl,-rpath,$LIB"]);
    let loaded = format!(
        "{TALK} int main(void) {{ int (*answer)(void) = dlsym(load(\"{}\"), \"answer\"); say(answer()); hear(); }}",
        workshop.path("libaddress.so").display()
    );
    let loaded = workshop.program("loaded", &loaded, &[]);
    for program in [linked, loaded] {
        let mut guest = Guest::start(&store, &workshop, &program);
        assert_eq!(guest.number(), 42);
        let rows = guest.explain();
        let code: Vec<_> =
            rows.iter().filter(|row| row.name.contains("libaddress.so") && row.access == "r-xp").collect();
        assert!(code.iter().any(|row| row.name.contains("orc:libaddress.so")), "{code:#?}");
        assert!(code.iter().any(|row| row.reason.starts_with(CHANGED)), "{code:#?}");
        // One page has the address, or two where it is across their border.
        let own: u64 = code.iter().map(|row| row.anonymous).sum();
        assert!((4096..=8192).contains(&own), "{code:#?}");
    }
}

/// Adds the right to write to all segments with code, and flips the bytes of a section, as packers do.
fn pack(path: &Path, hide: Option<&str>) {
    let mut bytes = fs::read(path).unwrap();
    if let Some(name) = hide {
        let (start, length) =
            object::File::parse(&*bytes).unwrap().section_by_name(name).unwrap().file_range().unwrap();
        let range = usize::try_from(start).unwrap()..usize::try_from(start + length).unwrap();
        bytes[range].iter_mut().for_each(|byte| *byte ^= 0x5a);
    }
    let number = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let table = usize::try_from(u64::from_le_bytes(bytes[32..40].try_into().unwrap())).unwrap();
    for header in (0..number(56)).map(|index| table + index * number(54)).collect::<Vec<_>>() {
        // A segment to be loaded that is readable and executable.
        if bytes[header] == 1 && bytes[header + 4] == 5 {
            bytes[header + 4] = 7;
        }
    }
    fs::write(path, bytes).unwrap();
}

/// A function whose bytes are hidden in the file, and what brings them back.
const HIDDEN: &str = "
__attribute__((section(\"packed\"), noinline, aligned(4096))) int secret(int x) { return x * 3 + 1; }
extern char __start_packed[], __stop_packed[];
static void unpack(void) { for (char *c = __start_packed; c < __stop_packed; c++) *c ^= 0x5a; }
";

#[test]
fn packed_programs_are_left_alone() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let source = format!(
        "{TALK}{HIDDEN} int main(void) {{ unpack(); say(secret(5)); hear(); say(secret(7)); hear(); }}"
    );
    let packed = workshop.program("packed", &source, &[]);
    pack(&packed, Some("packed"));
    let mut guest = Guest::start(&store, &workshop, &packed);
    assert_eq!((guest.number(), guest.go_on()), (16, 22));
    let reasons = guest.reasons("/packed", "rwxp");
    assert!(reasons.iter().all(|reason| reason.contains("writable and executable")), "{reasons:?}");
    assert!(guest.said().contains("writable and executable is left alone"), "{}", guest.said());
    assert!(is_shared(&guest, "libc.so.6"), "its libraries are shared as ever");
    // The way of UPX: no loader at all.
    let packed = workshop.program("static-packed", &source, &["-static"]);
    pack(&packed, Some("packed"));
    let mut guest = Guest::start(&store, &workshop, &packed);
    assert_eq!((guest.number(), guest.go_on()), (16, 22));
    assert!(guest.said().contains("left alone: the program is linked statically"), "{}", guest.said());
}

#[test]
fn libraries_with_writable_code_are_left_alone() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let source = "
        __asm__(\".text\\ncount: .long 40\\n\");
        extern int count __attribute__((visibility(\"hidden\")));
        int answer(void) { return ++count; }
        const char constant[40000] = {1};";
    let library = workshop.library("libwritable.so", source, &[]);
    pack(&library, None);
    let source = format!(
        "{TALK} int answer(void); int main(void) {{ say(answer()); hear(); say(answer()); hear(); }}"
    );
    let program = workshop.program("main", &source, &["-L$LIB", "-lwritable", "-Wl,-rpath,$LIB"]);
    let (mut one, mut two) =
        (Guest::start(&store, &workshop, &program), Guest::start(&store, &workshop, &program));
    for guest in [&mut one, &mut two] {
        assert_eq!((guest.number(), guest.go_on()), (41, 42), "each has its own");
        let reasons = guest.reasons("libwritable.so", "rwxp");
        assert!(reasons.iter().all(|reason| reason.contains("writable and executable")), "{reasons:?}");
        let reasons = guest.reasons("libwritable.so", "r--p");
        assert!(reasons.iter().any(|reason| reason == AN_OBJECT), "its constants are shared: {reasons:?}");
    }
}

#[test]
fn programs_that_change_their_own_code_do_so_alone() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let other = workshop.library("libother.so", "int other(void) { return 7; }", &[]);
    let source = format!(
        "{TALK}{HIDDEN} int main(void) {{
            say(0); hear();
            unsigned long start = (unsigned long)__start_packed & -4096ul, end = ((unsigned long)__stop_packed + 4095) & -4096ul;
            if (mprotect((void *)start, end - start, PROT_READ | PROT_WRITE | PROT_EXEC)) return 7;
            unpack();
            if (mprotect((void *)start, end - start, PROT_READ | PROT_EXEC)) return 6;
            say(secret(5)); hear();
            int (*other)(void) = dlsym(load(\"{}\"), \"other\");
            say(secret(other())); hear();
        }}",
        other.display()
    );
    let program = workshop.program("changing", &source, &[]);
    let mut bytes = fs::read(&program).unwrap();
    let range =
        object::File::parse(&*bytes).unwrap().section_by_name("packed").unwrap().file_range().unwrap();
    let range = usize::try_from(range.0).unwrap()..usize::try_from(range.0 + range.1).unwrap();
    bytes[range].iter_mut().for_each(|byte| *byte ^= 0x5a);
    fs::write(&program, bytes).unwrap();
    let (mut one, mut two) =
        (Guest::start(&store, &workshop, &program), Guest::start(&store, &workshop, &program));
    assert_eq!((one.number(), two.number()), (0, 0));
    assert!(is_shared(&one, "changing") && is_shared(&two, "changing"), "as the file has it");
    assert_eq!(one.go_on(), 16);
    let changed =
        |guest: &Guest| guest.reasons("changing", "r-xp").iter().any(|reason| reason.starts_with(CHANGED));
    assert!(changed(&one) && !changed(&two), "a copy of its own");
    // What is loaded later does not bring the old bytes back; the other program is where it was.
    assert_eq!(one.go_on(), 22);
    assert!(changed(&one) && is_shared(&one, "libother.so"));
    assert_eq!((two.go_on(), two.go_on()), (16, 22));
}

#[test]
fn programs_without_a_loader_that_listens_are_left_alone() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let source = format!("{TALK} int main(void) {{ say(1); hear(); }}");
    for (name, options) in [("static", ["-static"]), ("static-pie", ["-static-pie"])] {
        let program = workshop.program(name, &source, &options);
        let mut guest = Guest::start(&store, &workshop, &program);
        assert_eq!(guest.number(), 1);
        assert!(guest.said().contains("linked statically"), "{}", guest.said());
        assert!(guest.summary().contains("linked statically"), "{}", guest.summary());
        let reasons = guest.reasons(&format!("/{name}"), "r-xp");
        assert!(reasons.iter().all(|reason| reason.contains("linked statically")), "{reasons:?}");
    }
    // Nobody asked for it.
    let program = workshop.program("plain", &source, &[]);
    let mut command = std::process::Command::new(&program);
    command.env_remove("LD_AUDIT");
    let mut guest = Guest::spawn(command, &workshop);
    assert_eq!(guest.number(), 1);
    assert!(guest.summary().contains("not started by `orrery orc run`"), "{}", guest.summary());
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("set-user-id programs: only root can make files of other users");
        return;
    }
    let program = workshop.program("privileged", &source, &[]);
    std::os::unix::fs::chown(&program, Some(65_534), None).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755)).unwrap();
    let mut guest = Guest::start(&store, &workshop, &program);
    assert_eq!(guest.number(), 1);
    let summary = guest.summary();
    if summary.contains("not shared yet") {
        assert!(summary.contains("set-user-id"), "{summary}");
        assert!(!is_shared(&guest, "libc.so.6"));
    } else {
        orrery_testing::skipped!("set-user-id programs: they are none where this test's files lie (nosuid)");
    }
}

/// Returns a function at some distance from everything else, and data.
fn library_that_says(number: i32) -> String {
    format!(
        "__asm__(\".text\\n.skip 65536, 0x90\\n\");
         int far_away(void) {{ return {number}; }}
         __asm__(\".text\\n.skip 65536, 0x90\\n\");
         int answer(void) {{ return {number}; }}"
    )
}

#[test]
fn files_that_are_replaced_while_mapped_change_nothing() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let library = workshop.library("libfirst.so", &library_that_says(1), &[]);
    let next = workshop.library("libnext.so", &library_that_says(2), &[]);
    let source = format!(
        "{TALK} int answer(void), far_away(void);
         int main(void) {{ say(answer()); hear(); say(far_away()); hear(); say(answer()); hear(); }}"
    );
    let program = workshop.program("main", &source, &["-L$LIB", "-lfirst", "-Wl,-rpath,$LIB"]);
    let (mut written, mut renamed) =
        (Guest::start(&store, &workshop, &program), Guest::start(&store, &workshop, &program));
    assert_eq!((written.number(), renamed.number()), (1, 1));
    assert!(is_shared(&written, "libfirst.so") && is_shared(&renamed, "libfirst.so"));
    // The very file that is mapped is overwritten: a plain program would now run zeros.
    let length = fs::metadata(&library).unwrap().len();
    let file = fs::File::options().write(true).open(&library).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &vec![0; usize::try_from(length).unwrap()], 0).unwrap();
    drop(file);
    assert_eq!((written.go_on(), written.go_on()), (1, 1), "the old object stays");
    // Another one takes its name.
    fs::rename(&next, &library).unwrap();
    assert_eq!((renamed.go_on(), renamed.go_on()), (1, 1));
    let mut fresh = Guest::start(&store, &workshop, &program);
    assert_eq!((fresh.number(), fresh.go_on()), (2, 2));
    assert!(is_shared(&fresh, "libfirst.so"));
}

#[test]
fn files_that_are_replaced_before_they_are_looked_at_are_left_alone() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let library = workshop.library("libfirst.so", &library_that_says(1), &[]);
    let next = workshop.library("libnext.so", &library_that_says(2), &[]);
    // Another auditor, which is told first that the library is mapped.
    let source = format!(
        "#define _GNU_SOURCE
         #include <link.h>
         #include <stdio.h>
         #include <string.h>
         unsigned la_version(unsigned version) {{ return version; }}
         unsigned la_objopen(struct link_map *map, Lmid_t space, unsigned long *cookie) {{
             if (strstr(map->l_name, \"libfirst.so\")) rename(\"{}\", \"{}\");
             return 0;
         }}",
        next.display(),
        library.display()
    );
    let replacer = workshop.library("replacer.so", &source, &[]);
    let source = format!(
        "{TALK} int answer(void), far_away(void); int main(void) {{ say(answer() + 10 * far_away()); hear(); }}"
    );
    let program = workshop.program("main", &source, &["-L$LIB", "-lfirst", "-Wl,-rpath,$LIB"]);
    let auditors = |ours: &str| format!("{}:{ours}", replacer.display());
    let mut guest = Guest::audited(&store, &workshop, &program, auditors);
    assert_eq!(guest.number(), 11, "the file that the loader mapped, not the one that has its name now");
    assert!(guest.said().contains("no longer there under its name"), "{}", guest.said());
    let reasons = guest.reasons("libfirst.so", "r-xp");
    assert!(reasons.iter().all(|reason| reason.contains("no longer there")), "{reasons:?}");
    assert!(is_shared(&guest, "libc.so.6"));
}

#[test]
fn programs_that_are_replaced_before_they_are_looked_at_stay_what_they_are() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let source = |number: i32| {
        let answer = library_that_says(number);
        format!("{TALK} {answer} int main(void) {{ say(answer() + 10 * far_away()); hear(); }}")
    };
    let program = workshop.program("main", &source(1), &[]);
    let next = workshop.program("next", &source(2), &[]);
    // Both are known to the store, and have what is needed of them.
    for (path, said) in [(&program, 11), (&next, 22)] {
        let mut guest = Guest::start(&store, &workshop, path);
        assert_eq!(guest.number(), said);
        assert!(is_shared(&guest, path.file_name().unwrap().to_str().unwrap()));
    }
    // Another auditor puts one in the place of the other before ours looks at it.
    let source = format!(
        "#include <stdio.h>
         unsigned la_version(unsigned version) {{ rename(\"{}\", \"{}\"); return version; }}",
        next.display(),
        program.display()
    );
    let replacer = workshop.library("replacer.so", &source, &[]);
    let auditors = |ours: &str| format!("{}:{ours}", replacer.display());
    let mut guest = Guest::audited(&store, &workshop, &program, auditors);
    assert_eq!(guest.number(), 11, "the program that was started, not the one that has its name now");
    assert!(is_shared(&guest, "orc:main"), "the object that it has had before");
    let mut fresh = Guest::start(&store, &workshop, &program);
    assert_eq!(fresh.number(), 22);
}

#[test]
fn what_the_policy_refuses_is_explained() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let library = workshop.library("libfirst.so", &library_that_says(1), &[]);
    fs::set_permissions(&library, fs::Permissions::from_mode(0o666)).unwrap();
    fs::write(workshop.path("table"), [7; 100_000]).unwrap();
    let source = format!(
        "{TALK}
         #include <fcntl.h>
         int answer(void);
         int main(void) {{
             const char *table = mmap(0, 100000, PROT_READ, MAP_PRIVATE, open(\"{}\", O_RDONLY), 0);
             say(answer() + table[99999]); hear();
         }}",
        workshop.path("table").display()
    );
    let program = workshop.program("main", &source, &["-L$LIB", "-lfirst", "-Wl,-rpath,$LIB"]);
    let mut guest = Guest::start(&store, &workshop, &program);
    assert_eq!(guest.number(), 8);
    assert!(guest.said().contains("others may write it"), "{}", guest.said());
    let has = |name: &str, access: &str, part: &str| {
        let reasons = guest.reasons(name, access);
        assert!(reasons.iter().all(|reason| reason.contains(part)), "{reasons:?}");
    };
    has("libfirst.so", "r-xp", "others may write the file");
    has("/table", "r--p", "mapped by itself");
    has("liborrery-orc.so", "r-xp", "the auditor");
    // A quota that is used up.
    let small = Store::new(&["--quota", "64K"]);
    let _ = small.client();
    let mut guest = Guest::start(&small, &workshop, &program);
    assert_eq!(guest.number(), 8);
    assert!(guest.said().contains("the quota is used up"), "{}", guest.said());
    let reasons = guest.reasons("libc.so.6", "r-xp");
    assert!(reasons.iter().all(|reason| reason.contains("quota")), "{reasons:?}");
}

/// The library of a sanitizer has more thread-local variables than the loader has room for under an auditor.
#[test]
fn programs_with_sanitizers_start_and_are_left_alone() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let source = "
#include <pthread.h>
static void *add(void *number) { ++*(int *)number; return NULL; }
int main(int count, char **arguments) {
    int number = count;
    pthread_t thread;
    pthread_create(&thread, NULL, add, &number);
    pthread_join(thread, NULL);
    const char *auditors = getenv(\"LD_AUDIT\");
    printf(\"%d %s %s %s\\n\", number, arguments[1], getenv(\"KEPT\"), auditors ? auditors : \"none\");
}
";
    for sanitizer in ["thread", "leak"] {
        let name = format!("lib{}san.so", &sanitizer[..1]);
        let found = Command::new("cc").arg(format!("-print-file-name={name}")).output().unwrap();
        if !Path::new(String::from_utf8(found.stdout).unwrap().trim()).is_absolute() {
            orrery_testing::skipped!("there is no {name}");
            continue;
        }
        let options = ["-pthread", &format!("-fsanitize={sanitizer}")];
        let program = workshop.program(sanitizer, &format!("{TALK}{source}"), &options);
        let share = |auditors: &str| {
            let mut command = run(&store, &[program.to_str().unwrap(), "argument"]);
            command.env("KEPT", "kept").env("LD_AUDIT", auditors);
            command.env("TSAN_OPTIONS", "verbosity=0").output().unwrap()
        };
        // With the address space at random some kernels leave too little of it to the sanitizer: not our doing.
        let plain = Command::new(&program).arg("argument").env("KEPT", "kept").output().unwrap();
        if !plain.status.success() {
            orrery_testing::skipped!("-fsanitize={sanitizer} does not run here: {plain:?}");
            continue;
        }
        let output = share("");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "3 argument kept none", "{said}");
        assert!(said.contains("too many thread-local variables"), "{said}");
        // With an auditor of somebody else it is as without ours: the loader sets as little room aside for that one.
        let theirs = "/nonexistent/theirs.so";
        let plain =
            Command::new(&program).arg("argument").env("KEPT", "kept").env("LD_AUDIT", theirs).output();
        let (plain, output) = (plain.unwrap(), share(theirs));
        assert_eq!((plain.status, plain.stdout), (output.status, output.stdout));
    }
}

#[test]
fn programs_of_thirty_two_bits_run_without_a_word() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let (source, program) = (workshop.path("small.c"), workshop.path("small"));
    fs::write(&source, "int main(void) { return 7; }").unwrap();
    let built = Command::new("cc").args(["-m32", "-o"]).arg(&program).arg(&source).output().unwrap();
    if !built.status.success() {
        orrery_testing::skipped!(
            "cc -m32 fails; is the 32-bit C library installed (libc6-dev-i386, lib32gcc-*-dev)?"
        );
        return;
    }
    let plain = Command::new(&program).status();
    if plain.as_ref().map_or(true, |status| status.code() != Some(7)) {
        orrery_testing::skipped!("this kernel runs no 32-bit programs: {plain:?}");
        return;
    }
    let output = run(&store, &[program.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

/// `READY=1` comes when clients can connect.
#[test]
fn the_service_manager_is_notified() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
    let store = Store::with_variables(&[("NOTIFY_SOCKET", path.to_str().unwrap())], &[]);
    let mut buffer = [0; 100];
    let length = manager.recv(&mut buffer).unwrap();
    assert_eq!(buffer[..length].trim_ascii_end(), b"READY=1");
    orrery_orc_client::Client::connect_to(store.path()).unwrap();
}

/// As the service manager does when it stops a service.
#[test]
fn a_store_whose_processes_are_all_terminated_leaves_nothing() {
    let mut store = Store::new(&[]);
    run(&store, &["true"]).status().unwrap();
    let objects = store.path().join("objects");
    let server = store.server();
    crate::signal(server, libc::SIGTERM);
    crate::signal(i32::try_from(store.supervisor.id()).unwrap(), libc::SIGTERM);
    assert!(store.supervisor.wait().unwrap().success());
    assert!(!objects.exists(), "{objects:?}");
}

/// A service manager kills what is left of a service after a minute and a half, and the service has failed.
#[test]
fn a_store_without_a_supervisor_stops_in_time() {
    for pause in [0, 30, 400, 950, 1010, 1050] {
        let mut store = Store::new(&[]);
        run(&store, &["true"]).status().unwrap();
        let server = store.server();
        store.supervisor.kill().unwrap();
        store.supervisor.wait().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(pause));
        let all: Vec<i32> = std::iter::once(server).chain(crate::children(server)).collect();
        all.into_iter().for_each(|pid| crate::signal(pid, libc::SIGTERM));
        crate::eventually(&format!("the end, {pause} ms after the supervisor's"), || {
            crate::children(server).is_empty()
                && (crate::zombie(server) || !std::path::Path::new(&format!("/proc/{server}")).exists())
        });
        assert!(!store.path().join("objects").exists());
    }
}
