//! Programs that know nothing of it, under `orrery orc run`.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::{Store, eventually, signal};
use orrery_testing::Killed;

pub(crate) fn run(store: &Store, program: &[&str]) -> Command {
    run_by(Path::new(env!("CARGO_BIN_EXE_orrery")), store, program)
}

/// Runs a program by a copy of `orrery`: another user may not enter the checkout.
pub(crate) fn run_by(orrery: &Path, store: &Store, program: &[&str]) -> Command {
    let mut command = Command::new(orrery);
    command.args(["orc", "run", "--verbose", "--directory"]).arg(store.path()).arg("--").args(program);
    command.env_remove("ORRERY_ORC").env_remove("LD_AUDIT");
    command
}

/// The inode behind the code of the file of this name, and whether it is an object.
pub(crate) fn code(pid: u32, name: &str) -> Option<(u64, bool)> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let line = maps.lines().find(|line| line.contains(" r-xp ") && line.contains(name))?;
    Some((
        line.split_whitespace().nth(4)?.parse().ok()?,
        line.contains("/orc:") || line.contains("/memfd:orc:"),
    ))
}

/// Returns where a library of this process is in the file system.
fn library(name: &str) -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.contains(name)).unwrap();
    line.split_whitespace().nth(5).unwrap().to_owned()
}

#[test]
fn equal_files_of_different_trees_are_in_memory_once() {
    let store = Store::new(&[]);
    let _ = store.client();
    let trees = tempfile::tempdir().unwrap();
    let mut programs = Vec::new();
    for tree in ["one", "two"] {
        let tree = trees.path().join(tree);
        fs::create_dir(&tree).unwrap();
        orrery_testing::copy_program("/bin/sleep", tree.join("sleep"));
        fs::copy(library("/libc.so.6"), tree.join("libc.so.6")).unwrap();
        let program = tree.join("sleep");
        let child = run(&store, &[program.to_str().unwrap(), "1000"])
            .env("LD_LIBRARY_PATH", &tree)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        programs.push(Killed(child));
    }
    for file in ["sleep", "libc.so.6"] {
        let mut seen = Vec::new();
        for program in &programs {
            eventually("the exchange", || code(program.0.id(), file).is_some_and(|(_, object)| object));
            seen.push(code(program.0.id(), file).unwrap().0);
        }
        assert_eq!(seen[0], seen[1], "{file}");
    }
    // The store counts them, and knows them gone.
    let report = store.client().report().unwrap();
    assert!(report.objects.iter().any(|object| object.executable && object.holders.len() == 2));
    // Neither its death nor that of the files harms them.
    signal(store.server(), libc::SIGKILL);
    fs::remove_dir_all(trees.path().join("one")).unwrap();
    assert!(programs.iter_mut().all(|program| program.0.try_wait().unwrap().is_none()));
    drop(programs);
    eventually("no holders", || {
        store.client().report().unwrap().objects.iter().all(|object| object.holders.is_empty())
    });
}

pub(crate) const PYTHON: &str = "/usr/bin/python3";

/// Python at a prompt of ours: says `ready`, and runs what it is sent.
pub(crate) struct Python {
    child: Killed,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Python {
    pub(crate) fn start(store: &Store) -> Self {
        Self::start_with(store, &[PYTHON])
    }

    /// The command that becomes Python may be another one.
    pub(crate) fn start_with(store: &Store, command: &[&str]) -> Self {
        let script = "import sys\nprint('ready', flush=True)\nfor line in sys.stdin:\n exec(line)\n sys.stdout.flush()";
        let mut child = run(store, &[command, &["-S", "-c", script]].concat())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut python = Self { child: Killed(child), lines };
        assert_eq!(python.answer(), "ready");
        python
    }

    fn answer(&mut self) -> String {
        self.lines.next().unwrap().unwrap()
    }

    pub(crate) fn ask(&mut self, statement: &str) -> String {
        writeln!(self.child.0.stdin.as_mut().unwrap(), "{statement}").unwrap();
        self.answer()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.0.id()
    }

    fn module(&self, name: &str) -> Option<(u64, bool)> {
        code(self.child.0.id(), name)
    }
}

#[test]
fn what_is_loaded_later_is_shared_too() {
    if !Path::new(PYTHON).exists() {
        orrery_testing::skipped!("there is no {PYTHON}");
        return;
    }
    let store = Store::new(&[]);
    let _ = store.client();
    let (mut one, mut two) = (Python::start(&store), Python::start(&store));
    let import = "import ctypes; print(ctypes.sizeof(ctypes.c_long))";
    assert_eq!((one.ask(import), two.ask(import)), ("8".to_owned(), "8".to_owned()));
    let (module, object) = one.module("_ctypes").unwrap();
    assert!(object && two.module("_ctypes") == Some((module, true)));
    // The loader still finds addresses (dladdr) and files as if nothing had happened.
    let find = "d = ctypes.CDLL(None); b = ctypes.create_string_buffer(64); \
                print(d.dladdr(ctypes.cast(d.getpid, ctypes.c_void_p), b), \
                ctypes.string_at(ctypes.cast(b, ctypes.POINTER(ctypes.c_char_p))[0]))";
    let found = one.ask(find);
    assert!(found.starts_with('1') && found.contains("libc.so.6"), "{found}");
    // A store that died in between is asked again when it is back.
    signal(store.server(), libc::SIGKILL);
    assert_eq!(one.ask("import _json; print(_json.encode_basestring('x'))"), "\"x\"");
    // A forked child speaks for itself.
    let forked = "import os; p = os.fork(); p or (__import__('_bisect'), print('child', flush=True), os._exit(0)); \
                  os.waitpid(p, 0)";
    assert_eq!(one.ask(forked), "child");
    assert_eq!(one.ask("import _random; print('parent')"), "parent");
    let shared = |name| one.module(name).is_none_or(|(_, object)| object);
    assert!(shared("_json") && shared("_random"));
}

#[test]
fn programs_that_filter_their_system_calls_are_left_alone() {
    if !Path::new(PYTHON).exists() {
        orrery_testing::skipped!("there is no {PYTHON}");
        return;
    }
    let store = Store::new(&[]);
    let _ = store.client();
    let mut python = Python::start(&store);
    python.ask("import ctypes, struct; print(1)");
    // A filter that kills whoever makes a socket or sends a message, and allows the rest.
    let filter = "n = lambda c, t, f, k: struct.pack('HBBI', c, t, f, k); \
        p = n(0x20, 0, 0, 0) + n(0x15, 2, 0, 41) + n(0x15, 1, 0, 46) + n(6, 0, 0, 0x7fff0000) + n(6, 0, 0, 0x80000000); \
        b = ctypes.create_string_buffer(p); s = struct.pack('HxxxxxxP', 5, ctypes.addressof(b)); \
        d = ctypes.CDLL(None); print(d.prctl(38, 1, 0, 0, 0), d.prctl(22, 2, ctypes.create_string_buffer(s)))";
    let set = python.ask(filter);
    if set != "0 0" {
        orrery_testing::skipped!("no filter can be set here ({set})");
        return;
    }
    assert_eq!(python.ask("import _json; print(_json.encode_basestring('x'))"), "\"x\"");
    assert!(python.module("_json").is_none_or(|(_, object)| !object));
    assert!(python.module("_ctypes").is_some_and(|(_, object)| object), "what was shared before stays");
}

#[test]
fn libraries_with_many_thread_local_variables_are_loaded() {
    // Its jemalloc wants 3 KiB of them, at fixed places.
    let redis = ["/usr/bin/redis-server", "/usr/bin/redis-check-rdb"];
    let Some(redis) = redis.into_iter().find(|path| Path::new(path).exists()) else {
        orrery_testing::skipped!("there is no Redis");
        return;
    };
    let store = Store::new(&[]);
    let _ = store.client();
    let output = run(&store, &[redis, "--version"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!said.contains("static TLS"), "{said}");
}

#[test]
fn without_a_store_programs_run_as_ever() {
    let store = Store::new(&[]);
    let _ = store.client();
    let print = Command::new(env!("CARGO_BIN_EXE_orrery"))
        .args(["orc", "run", "--print", "--directory"])
        .arg(store.path())
        .output()
        .unwrap();
    let variables = String::from_utf8(print.stdout).unwrap();
    assert!(variables.contains("LD_AUDIT=") && variables.contains("ORRERY_ORC="), "{variables}");
    let auditor = store.path().join("liborrery-orc.so");
    let plain = |directory: &str| {
        let output = Command::new("/bin/echo")
            .arg("hello")
            .env("LD_AUDIT", &auditor)
            .env("ORRERY_ORC", directory)
            .env("ORRERY_ORC_VERBOSE", "1")
            .output()
            .unwrap();
        assert_eq!(output.stdout, b"hello\n");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(plain("/nonexistent").contains("there is no store"));
    assert_eq!(plain(""), "");
    assert_eq!(plain(&"x".repeat(5000)), "");
    // Somebody who answers nothing costs some seconds, once.
    let deaf = tempfile::tempdir().unwrap();
    let kind = rustix::net::SocketType::SEQPACKET;
    let closed = rustix::net::SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(rustix::net::AddressFamily::UNIX, kind, closed, None).unwrap();
    let address = rustix::net::SocketAddrUnix::new(deaf.path().join("socket")).unwrap();
    rustix::net::bind(&socket, &address).unwrap();
    rustix::net::listen(&socket, 1).unwrap();
    assert!(plain(deaf.path().to_str().unwrap()).contains("does not answer"));
    // Nor does it take longer where so many wait already that nobody can connect.
    let flags = rustix::net::SocketFlags::NONBLOCK | rustix::net::SocketFlags::CLOEXEC;
    let mut waiting = Vec::new();
    loop {
        let one = rustix::net::socket_with(rustix::net::AddressFamily::UNIX, kind, flags, None).unwrap();
        match rustix::net::connect(&one, &address) {
            Ok(()) => waiting.push(one),
            // The program from before may wait there more than once: on a busy machine it has tried again.
            Err(error) => break assert_eq!(error, rustix::io::Errno::AGAIN),
        }
    }
    assert!(plain(deaf.path().to_str().unwrap()).contains("there is no store"));
    let missing = run(&store, &["/nonexistent"]).output().unwrap();
    assert!(!missing.status.success());
    assert!(String::from_utf8_lossy(&missing.stderr).contains("run /nonexistent"));
    let status = run(&store, &["sh", "-c", "exit 7"]).status().unwrap();
    assert_eq!(status.code(), Some(7));
}
