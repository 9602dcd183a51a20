//! Objects with names: programs that are told all they need by the store's index ask nobody.

use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::guest::{Guest, TALK, Workshop};
use crate::unmodified::{PYTHON, Python, code, run, run_by};
use crate::{Store, eventually, signal};
use orrery_testing::Killed;

/// The directory of the objects of this user's programs, if objects have names here.
fn directory(store: &Store) -> Option<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let directory = store.path().join(format!("objects/{uid}"));
    let is_there = directory.join("index").exists();
    if !is_there {
        orrery_testing::skipped!("no file can be made immutable here, so objects have no names");
    }
    is_there.then_some(directory)
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

struct Sleeper(Killed);

impl Sleeper {
    /// Starts a program of its own and waits until its code is an object.
    fn start(store: &Store, program: &Path) -> Self {
        let child = run(store, &[program.to_str().unwrap(), "1000"]).stderr(Stdio::null()).spawn().unwrap();
        let this = Self(Killed(child));
        let name = program.file_name().unwrap().to_str().unwrap();
        eventually("the exchange", || code(this.0.id(), name).is_some_and(|(_, object)| object));
        this
    }

    /// Returns whether it is connected to the store, which it is through a high descriptor: tests beside this one may
    /// have others leak.
    fn asks(&self) -> bool {
        let links = fs::read_dir(format!("/proc/{}/fd", self.0.id())).unwrap().flatten();
        let number = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().parse::<u32>().unwrap_or(0);
        links
            .filter(|entry| number(entry) >= 900)
            .filter_map(|entry| fs::read_link(entry.path()).ok())
            .any(|link| link.to_string_lossy().starts_with("socket:"))
    }
}

/// A program that is in nobody's index yet.
fn program(directory: &Path) -> PathBuf {
    let path = directory.join("dozer");
    orrery_testing::copy_program("/bin/sleep", &path);
    path
}

#[test]
fn what_is_known_is_had_without_asking_even_of_the_dead() {
    let store = Store::new(&[]);
    let _ = store.client();
    let tree = tempfile::tempdir().unwrap();
    let program = program(tree.path());
    let first = Sleeper::start(&store, &program);
    assert!(first.asks(), "it was the first");
    if directory(&store).is_none() {
        return;
    }
    // It is sent all of them at once, and exchanges one after the other.
    let files = ["dozer", "libc.so.6", "ld-linux"];
    let has = |file: &&str| code(first.0.id(), file).is_some_and(|(_, object)| object);
    eventually("all of it", || files.iter().all(has));
    let second = Sleeper::start(&store, &program);
    assert!(!second.asks());
    for file in files {
        let (one, two) = (code(first.0.id(), file).unwrap(), code(second.0.id(), file).unwrap());
        assert!(one == two && one.1, "{file}: {one:?} {two:?}");
    }
    // A store that hangs is not waited for.
    let server = store.server();
    signal(server, libc::SIGSTOP);
    let third = Sleeper::start(&store, &program);
    assert!(!third.asks());
    signal(server, libc::SIGCONT);
    // Nor is one that is dead needed.
    signal(i32::try_from(store.supervisor.id()).unwrap(), libc::SIGSTOP);
    signal(server, libc::SIGKILL);
    let fourth = Sleeper::start(&store, &program);
    assert!(!fourth.asks());
    signal(i32::try_from(store.supervisor.id()).unwrap(), libc::SIGCONT);
    eventually("a new store", || store.server() != server);
    // Which takes over what there is.
    let fifth = Sleeper::start(&store, &program);
    assert!(!fifth.asks());
    assert_eq!(code(fifth.0.id(), "dozer"), code(first.0.id(), "dozer"));
}

#[test]
fn an_object_that_loses_its_name_before_it_is_opened_is_done_without() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let library = workshop.library("libfirst.so", "int answer(void) { return 7; }", &[]);
    let source = format!("{TALK} int answer(void); int main(void) {{ say(answer()); hear(); }}");
    let program = workshop.program("main", &source, &["-L$LIB", "-lfirst", "-Wl,-rpath,$LIB"]);
    for _ in 0..2 {
        assert_eq!(Guest::start(&store, &workshop, &program).number(), 7);
    }
    let Some(directory) = directory(&store) else { return };
    let object = names(&directory).into_iter().find(|name| name.starts_with("orc:libfirst")).unwrap();
    // Another auditor, which hears what the loader is to open, and clears it away as a new store would.
    let source = "
        #include <fcntl.h>
        #include <linux/fs.h>
        #include <string.h>
        #include <sys/ioctl.h>
        #include <unistd.h>
        unsigned la_version(unsigned version) { return version; }
        char *la_objsearch(const char *name, unsigned long *cookie, unsigned flag) {
            if (strstr(name, \"/orc:libfirst.so\")) {
                int fd = open(name, O_RDONLY), flags = 0;
                ioctl(fd, FS_IOC_SETFLAGS, &flags);
                unlink(name);
                close(fd);
            }
            return (char *)name;
        }";
    let remover = workshop.library("remover.so", source, &[]);
    let auditors = |ours: &str| format!("{ours}:{}", remover.display());
    let mut guest = Guest::audited(&store, &workshop, &program, auditors);
    assert_eq!(guest.number(), 7, "from the file itself: {}", guest.said());
    assert!(!directory.join(&object).exists(), "the object was removed");
    let maps = fs::read_to_string(format!("/proc/{}/maps", guest.pid())).unwrap();
    assert!(maps.contains(library.to_str().unwrap()), "{maps}");
}

/// A program that loads the library of its first argument, by its path, and says as bits what is right of what the loader says of it.
/// When it goes on it says whether it has the same library by the path and by the link of its second argument.
const BY_PATH: &str = r#"
#include <link.h>
int main(int count, char **arguments) {
    const char *path = arguments[1];
    char origin[4096], directory[4096];
    struct link_map *map;
    Dl_info info;
    strcpy(directory, path), *strrchr(directory, '/') = 0;
    void *library = load(path);
    void *(*beside)(void) = dlsym(library, "beside");
    dlinfo(library, RTLD_DI_LINKMAP, &map), dlinfo(library, RTLD_DI_ORIGIN, origin);
    dladdr(dlsym(library, "answer"), &info);
    say(!strcmp(map->l_name, path) | !strcmp(origin, directory) << 1 | !strcmp(info.dli_fname, path) << 2 |
        (beside() != NULL) << 3 | (dlopen(path, RTLD_NOW | RTLD_NOLOAD) == library) << 4);
    hear();
    say((load(path) == library) | (load(arguments[2]) == library) << 1);
    hear();
}
"#;

#[test]
fn libraries_that_are_loaded_by_their_paths_keep_them() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    workshop.library("beside.so", "int beside;", &[]);
    let source = "
        #include <dlfcn.h>
        int answer(void) { return 7; }
        void *beside(void) { return dlopen(\"$ORIGIN/beside.so\", RTLD_NOW); }";
    let program = workshop.program("main", &format!("{TALK}{BY_PATH}"), &[]);
    // Paths that are shorter and longer than what takes their place.
    let long = workshop.path(&"long/".repeat(30));
    fs::create_dir_all(&long).unwrap();
    fs::copy(workshop.path("beside.so"), long.join("beside.so")).unwrap();
    let first = workshop.library("plugin.so", source, &[]);
    let second = long.join("plugin.so");
    fs::copy(workshop.library("other.so", &format!("{source}\nint other;"), &[]), &second).unwrap();
    for path in [first, second] {
        let link = path.with_file_name("link.so");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let arguments = [&program, &path, &link].map(|path| path.to_str().unwrap());
        let start = || Guest::spawn(run(&store, &arguments), &workshop);
        let is_mapped = |guest: &Guest| {
            let maps = fs::read_to_string(format!("/proc/{}/maps", guest.pid())).unwrap();
            maps.contains(path.to_str().unwrap())
        };
        let mut unknown = start();
        assert_eq!(unknown.number(), 31, "{}", unknown.said());
        assert_eq!(unknown.go_on(), 3, "{}", unknown.said());
        if directory(&store).is_none() {
            return;
        }
        let mut known = start();
        assert_eq!(known.number(), 31, "{}", known.said());
        assert!(!is_mapped(&known), "all of it is the object's, and nothing was exchanged: {}", known.said());
        assert!(code(known.pid(), "orc:").is_some_and(|(_, is_object)| is_object));
        // Another file under its name does not make it another library.
        fs::remove_file(&path).unwrap();
        fs::copy(workshop.path("beside.so"), &path).unwrap();
        assert_eq!(known.go_on() & 1, 1, "{}", known.said());
    }
}

/// A thread may have descriptors of its own: those of the first one, which are in /proc/self, are other files.
#[test]
fn a_thread_with_descriptors_of_its_own_is_given_objects_too() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let plugin = workshop.library("plugin.so", "int answer(void) { return 7; }", &[]);
    let source = format!(
        "{TALK}
        #include <pthread.h>
        #include <sched.h>
        static void *loads(void *path) {{
            return unshare(CLONE_FILES) ? NULL : dlsym(load(path), \"answer\");
        }}
        int main(void) {{
            pthread_t thread;
            void *answer = NULL;
            if (!pthread_create(&thread, NULL, loads, \"{}\")) pthread_join(thread, &answer);
            say(answer ? ((int (*)(void))answer)() : 0); hear();
        }}",
        plugin.display()
    );
    let program = workshop.program("threads", &source, &["-pthread"]);
    let mut first = Guest::start(&store, &workshop, &program);
    assert_eq!(first.number(), 7, "{}", first.said());
    if directory(&store).is_none() {
        return;
    }
    let mut known = Guest::start(&store, &workshop, &program);
    assert_eq!(known.number(), 7, "{}", known.said());
    let maps = fs::read_to_string(format!("/proc/{}/maps", known.pid())).unwrap();
    assert!(!maps.contains(plugin.to_str().unwrap()), "it is loaded from the object: {maps}");
}

/// An index that has grown is another file, with its entries elsewhere: half of them, so several are looked for.
#[test]
fn a_program_that_runs_finds_what_is_known_when_the_index_has_grown() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let client = store.client();
    let plugins: Vec<_> = (0..10)
        .map(|number| {
            let source = format!("int answer(void) {{ return {number}; }}");
            workshop.library(&format!("plugin{number}.so"), &source, &[])
        })
        .collect();
    let source = format!(
        "{TALK} int main(int count, char **arguments) {{
            int sum = 0;
            say(1); hear();
            for (int i = 1; i < count; i++) sum += ((int (*)(void))dlsym(load(arguments[i]), \"answer\"))();
            say(sum); hear();
        }}"
    );
    let program = workshop.program("main", &source, &[]);
    let command: Vec<_> =
        std::iter::once(&program).chain(&plugins).map(|path| path.to_str().unwrap()).collect();
    let start = || Guest::spawn(run(&store, &command), &workshop);
    let mut first = start();
    assert_eq!((first.number(), first.go_on()), (1, 45), "{}", first.said());
    let Some(directory) = directory(&store) else { return };
    let mut runs = start();
    assert_eq!(runs.number(), 1);
    let size = || fs::metadata(directory.join("index")).unwrap().len();
    let before = size();
    let shown = orrery_orc_client::protocol::FileRange { flags: 0, offset: 0, length: 4096 };
    for number in 0..2500 {
        let path = workshop.path(&format!("file{number}"));
        fs::write(&path, crate::bytes(4096, number)).unwrap();
        client.files(&[(shown, fs::File::open(&path).unwrap().as_fd())]).unwrap();
    }
    assert!(size() > before, "it has {before} bytes as before");
    assert_eq!(runs.go_on(), 45);
    let maps = fs::read_to_string(format!("/proc/{}/maps", runs.pid())).unwrap();
    for plugin in &plugins {
        assert!(!maps.contains(plugin.to_str().unwrap()), "it is loaded from the object: {maps}");
    }
}

#[test]
fn small_libraries_that_are_loaded_by_their_paths_are_left_to_their_files() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let small = workshop.small_library("libsmall.so", "int answer(void) { return 7; }", &[]);
    let linked = format!("{TALK} int answer(void); int main(void) {{ say(answer()); hear(); }}");
    let linked = workshop.program("linked", &linked, &["-L$LIB", "-lsmall", "-Wl,-rpath,$LIB"]);
    for _ in 0..2 {
        let mut guest = Guest::start(&store, &workshop, &linked);
        assert_eq!(guest.number(), 7);
        assert!(code(guest.pid(), "libsmall.so").unwrap().1, "found by its name it is shared");
    }
    let source = format!(
        "{TALK} int main(void) {{
            void *library = load(\"{}\");
            say(load(\"libsmall.so\") == library); hear();
        }}",
        small.display()
    );
    let program = workshop.program("loads", &source, &["-Wl,-rpath,$LIB"]);
    let mut guest = Guest::start(&store, &workshop, &program);
    assert_eq!(guest.number(), 1, "it is one library, however it is found: {}", guest.said());
    assert!(!code(guest.pid(), "libsmall.so").unwrap().1, "loaded by its path it is left alone");
    assert!(guest.said().contains("libsmall.so: left alone: it is small"), "{}", guest.said());
}

#[test]
fn what_is_used_without_asking_stays_and_what_is_not_goes() {
    let store = Store::new(&["--keep", "0"]);
    let client = store.client();
    let tree = tempfile::tempdir().unwrap();
    let program = program(tree.path());
    let first = Sleeper::start(&store, &program);
    let Some(directory) = directory(&store) else { return };
    let second = Sleeper::start(&store, &program);
    let object = |name: &String| name.starts_with("orc:dozer");
    assert_eq!(names(&directory).iter().filter(|name| object(name)).count(), 1);
    drop(first);
    eventually("the first is gone", || {
        client.report().unwrap().objects.iter().all(|object| object.holders.is_empty())
    });
    // Objects that nobody uses go at once, which shows that the store has looked.
    let file = tree.path().join("unused");
    fs::write(&file, crate::bytes(10_000, 5)).unwrap();
    let shown = orrery_orc_client::protocol::FileRange { flags: 0, offset: 0, length: 12_288 };
    let passing = store.client();
    let (answers, _) = passing.files(&[(shown, fs::File::open(&file).unwrap().as_fd())]).unwrap();
    assert!(answers[0].refusal.is_none());
    assert!(names(&directory).iter().any(|name| name.starts_with("orc:unused")));
    drop(passing);
    eventually("the unused goes", || !names(&directory).iter().any(|name| name.starts_with("orc:unused")));
    assert!(names(&directory).iter().any(object), "it is used still");
    drop(second);
    eventually("the object goes", || !names(&directory).iter().any(object));
    // What is gone is asked for, and made again.
    let third = Sleeper::start(&store, &program);
    assert!(third.asks() && names(&directory).iter().any(object));
    drop(third);
    drop(client);
    let path = store.path().join("objects");
    drop(store);
    assert!(!path.exists(), "nothing is left");
}

#[test]
fn what_is_started_again_and_again_stays_though_each_start_is_short() {
    const KEEP: Duration = Duration::from_secs(3);
    let store = Store::new(&["--keep", &KEEP.as_secs().to_string()]);
    let _ = store.client();
    let tree = tempfile::tempdir().unwrap();
    let program = tree.path().join("brief");
    orrery_testing::copy_program("/bin/true", &program);
    let start = || assert!(run(&store, &[program.to_str().unwrap()]).status().unwrap().success());
    // One copy is started all the time, the other one once: that it goes shows that the store has looked.
    let other = tree.path().join("once");
    orrery_testing::copy_program("/bin/sleep", &other);
    assert!(run(&store, &[other.to_str().unwrap(), "0"]).status().unwrap().success());
    start();
    let Some(directory) = directory(&store) else { return };
    let object =
        |of: &str| names(&directory).into_iter().find(|name| name.starts_with(&format!("orc:{of}.")));
    let inode = || object("brief").map(|name| fs::metadata(directory.join(name)).unwrap().ino());
    let (first, begin) = (inode(), Instant::now());
    assert!(first.is_some() && object("once").is_some());
    while begin.elapsed() < 2 * KEEP || object("once").is_some() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the store never looks");
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(inode(), first, "it was evicted after {:?}, and made again", begin.elapsed());
        start();
    }
    eventually("nobody starts it any more", || object("brief").is_none());
}

#[test]
fn libraries_are_loaded_as_often_as_ever() {
    if !Path::new(PYTHON).exists() {
        orrery_testing::skipped!("there is no {PYTHON}");
        return;
    }
    let store = Store::new(&[]);
    let _ = store.client();
    let tree = tempfile::tempdir().unwrap();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let library =
        maps.lines().find_map(|line| line.split_whitespace().nth(5).filter(|at| at.contains("libc.so.6")));
    // One that Python does not load by itself.
    let original = PathBuf::from(library.unwrap()).with_file_name("libresolv.so.2");
    // The same bytes under two names are two libraries; two names of one file are one.
    for copy in ["libone.so", "libother.so"] {
        fs::copy(&original, tree.path().join(copy)).unwrap();
    }
    std::os::unix::fs::symlink(tree.path().join("libone.so"), tree.path().join("libagain.so")).unwrap();
    let at = tree.path().display();
    let ask = |python: &mut Python| {
        python.ask("import ctypes; print(1)");
        let handles = format!(
            "h = [ctypes.CDLL(n)._handle for n in ('libone.so', '{at}/libone.so', '{at}/libagain.so', 'libagain.so', \
             'libother.so', '{at}/libother.so', 'libc.so.6', '{}')]; print([h.index(x) for x in h])",
            library.unwrap()
        );
        let found = python.ask(&handles);
        let find = "print(sorted({l.split()[5].split('/')[-1].split('.so')[0] for l in open('/proc/self/maps') \
                    if 'r-xp' in l and ('libone' in l or 'libother' in l or '/libagain' in l)}))";
        (found, python.ask(find))
    };
    let start = || Python::start_with(&store, &["env", &format!("LD_LIBRARY_PATH={at}"), PYTHON]);
    let expected = "[0, 0, 0, 0, 4, 4, 6, 6]";
    assert_eq!(ask(&mut start()).0, expected, "when they are known to nobody");
    let (found, mapped) = ask(&mut start());
    assert_eq!(found, expected, "when they have names");
    if directory(&store).is_some() {
        assert!(mapped.contains("orc:libone") || mapped.contains("orc:libother"), "{mapped}");
    }
    // The loader's names are the files', not the objects'.
    let mut python = start();
    let find = "import ctypes; ctypes.CDLL('libone.so'); d = ctypes.CDLL(None); i = (ctypes.c_void_p * 4)(); \
                d.dladdr(ctypes.cast(ctypes.CDLL('libone.so').ns_datetosecs, ctypes.c_void_p), i); \
                print(ctypes.string_at(i[0]).decode())";
    assert_eq!(python.ask(find), format!("{at}/libone.so"));
    // Nothing stays open, also where nothing was loaded.
    let open = "import os; print([l for l in (os.path.realpath(f'/proc/self/fd/{f}') for f in range(3, 64)) \
                if '/objects/' in l])";
    assert_eq!(python.ask(open), "[]");
    // Unloaded and loaded again.
    let again = "import _ctypes; l = ctypes.CDLL('libother.so')._handle; _ctypes.dlclose(l); \
                 print(ctypes.CDLL('libother.so').abs(-3))";
    assert_eq!(python.ask(again), "3");
    // A file that changes is another library.
    let other =
        maps.lines().find_map(|line| line.split_whitespace().nth(5).filter(|at| at.contains("libgcc_s")));
    if let Some(other) = other {
        fs::remove_file(tree.path().join("libone.so")).unwrap();
        fs::copy(other, tree.path().join("libone.so")).unwrap();
        let mut python = start();
        let has = "import ctypes; l = ctypes.CDLL('libone.so'); print(hasattr(l, 'ns_datetosecs'), hasattr(l, '_Unwind_Resume'))";
        assert_eq!(python.ask(has), "False True");
    }
}

/// A program of another user, when its code is an object.
fn start_as(store: &Store, uid: u32) -> Sleeper {
    let public = orrery_testing::PublicDirectory::new();
    let orrery = public.copy(env!("CARGO_BIN_EXE_orrery"));
    let mut command = run_by(&orrery, store, &["/bin/sleep", "1000"]);
    let child = command.uid(uid).gid(uid).stderr(Stdio::null()).spawn().unwrap();
    let sleeper = Sleeper(Killed(child));
    eventually("the exchange", || code(sleeper.0.id(), "sleep").is_some_and(|(_, object)| object));
    sleeper
}

#[test]
fn other_users_reach_what_is_on_the_disk() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only the superuser can start programs of other users");
        return;
    }
    let user = 65_533;
    let disk = tempfile::tempdir().unwrap();
    fs::set_permissions(disk.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    // The store makes it.
    let objects = disk.path().join("objects");
    let store = Store::new(&["--disk", objects.to_str().unwrap()]);
    let _ = store.client();
    let first = start_as(&store, user);
    if !objects.join(format!("objects/user-{user}")).exists() {
        orrery_testing::skipped!("objects of other users have no names here");
        return;
    }
    let second = start_as(&store, user);
    assert!(first.asks() && !second.asks());
    drop((first, second, store));
    crate::sweep(&objects);
}

#[test]
fn other_users_have_folders_of_their_own() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only the superuser can start programs of other users");
        return;
    }
    let store = Store::new(&[]);
    let _ = store.client();
    let (one, other) = (65_531, 65_532);
    let start = |uid: u32| start_as(&store, uid);
    let first = start(one);
    let directory = store.path().join(format!("objects/{one}"));
    if !directory.join("index").exists() {
        orrery_testing::skipped!("objects of other users have no names here");
        return;
    }
    let second = start(one);
    assert!(first.asks() && !second.asks());
    let stranger = start(other);
    assert!(stranger.asks());
    assert_ne!(code(first.0.id(), "sleep"), code(stranger.0.id(), "sleep"));
    let sees = |uid: u32, path: &Path| {
        let mut command = std::process::Command::new("/bin/ls");
        command.arg(path).uid(uid).gid(uid).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().unwrap().success()
    };
    assert!(sees(one, &directory) && !sees(other, &directory), "one's own only");
    assert!(!sees(one, &store.path().join("objects")), "nor who else there is");
    // Not even the user can change an object, or put something in its place.
    let object = names(&directory).into_iter().find(|name| name.starts_with("orc:sleep")).unwrap();
    for command in [
        format!("echo x >> '{0}/{object}'", directory.display()),
        format!("rm -f '{0}/{object}'", directory.display()),
        format!("touch '{0}/new'", directory.display()),
        format!("chmod 777 '{0}'", directory.display()),
    ] {
        let mut shell = std::process::Command::new("/bin/sh");
        shell.args(["-c", &command]).uid(one).gid(one).stderr(Stdio::null());
        assert!(!shell.status().unwrap().success(), "{command}");
    }
}
