//! `orrery status` and `orrery top`, run as their users run them, on servers of these tests.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use orrery_orbit::{Call, Orbit};
use orrery_orc_client::{Client, Flags};
use orrery_testing::{Killed, eventually, until};
use rustix::pty::OpenptFlags;
use rustix::termios::{LocalModes, Termios, Winsize, tcgetattr, tcsetwinsize};
use serde_json::Value;

/// A directory that stands for the user's own, so that no server of the machine's is at a default place in it.
struct Scene {
    directory: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn orrery(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
        command.args(arguments).env("XDG_RUNTIME_DIR", self.directory.path()).stdin(Stdio::null());
        for variable in ["ORRERY_WARM", "ORRERY_ORC", "ORRERY_MANAGER"] {
            command.env_remove(variable);
        }
        command
    }

    fn start(&self, arguments: &[&str]) -> Killed {
        let mut command = self.orrery(arguments);
        Killed(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    fn status(&self, arguments: &[&str]) -> Value {
        let output = self.orrery(&["status", "--json"]).args(arguments).output().unwrap();
        let status: Value = serde_json::from_str(&text(&output)).unwrap();
        assert_eq!(status["schema"], 1);
        assert!(status["taken_at_unix_seconds"].as_f64().unwrap() > 1e9);
        status
    }

    /// A store that has an object, and its client.
    fn store(&self) -> (Store, PathBuf, Client) {
        let directory = self.path("store");
        let store = Store(self.start(&["orc", "serve", "--directory", directory.to_str().unwrap()]));
        let client = until("the store serves", || Client::connect_to(&directory).ok());
        let bytes: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
        // The object stays for a minute after it is dropped.
        drop(client.register(&bytes, Flags::none()).unwrap());
        let socket = directory.join("socket").canonicalize().unwrap();
        (store, socket, client)
    }
}

/// A store is ended in order: its other process starts it again otherwise.
struct Store(Killed);

impl Drop for Store {
    fn drop(&mut self) {
        signal(self.0.id(), libc::SIGTERM);
        let _ = self.0.wait();
    }
}

fn signal(pid: u32, signal: i32) {
    // SAFETY: a system call without pointers; tests signal only what they started.
    unsafe { libc::kill(pid.cast_signed(), signal) };
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn find(status: &Value, kind: &str, name: &str) -> Option<Value> {
    let items = status["items"].as_array().unwrap();
    items.iter().find(|item| item["kind"] == kind && item["name"] == name).cloned()
}

#[test]
fn a_store_is_found_by_its_process() {
    let scene = Scene::new();
    let (_store, socket, client) = scene.store();
    let name = socket.to_str().unwrap();
    let store = until("the store is shown", || find(&scene.status(&["--kind", "orc"]), "orc", name));
    let figures = &store["figures"];
    assert_eq!((&figures["objects"], &figures["object_bytes"]), (&1.into(), &400_000.into()));
    assert_eq!(store["pid"], client.report().unwrap().pid);
    assert!(store["started_at_unix_seconds"].as_f64().unwrap() > 1e9);
    assert!(figures["process_resident_bytes"].as_u64().unwrap() > 0);
    assert_eq!(store["parts"][0]["role"], "trust_domain");
    // The same in the other forms.
    let table = until("the table has it", || {
        let table = text(&scene.orrery(&["status", "--kind", "orc"]).env("COLUMNS", "250").output().unwrap());
        table.contains(name).then_some(table)
    });
    assert!(table.contains("KIND") && table.contains("objects 1"), "{table}");
    let metrics = until("the metrics have it", || {
        let metrics = text(&scene.orrery(&["status", "--prometheus"]).output().unwrap());
        metrics.contains(name).then_some(metrics)
    });
    let line = |start: &str| {
        let mut lines = metrics.lines().filter(|line| line.starts_with(start));
        lines.find(|line| line.contains(name)).unwrap_or_else(|| panic!("{start}: {metrics}")).to_owned()
    };
    assert!(line("orrery_orc_object_bytes{").ends_with(" 400000"));
    assert!(line("orrery_orc_info{").contains("state=\"serves\""));
    assert!(metrics.contains("# TYPE orrery_orc_object_bytes gauge"));
    // Other kinds are not asked.
    assert!(find(&scene.status(&["--kind", "guard"]), "orc", name).is_none());
}

#[test]
fn orbits_are_shown_with_their_program() {
    let orbit = Orbit::builder("seen by status").entry(|_| 1).create().unwrap();
    for _ in 0..3 {
        orbit.call(&Call::new()).unwrap();
    }
    let scene = Scene::new();
    let item =
        until("the orbit is shown", || find(&scene.status(&["--kind", "orbit"]), "orbit", "seen by status"));
    assert_eq!(item["main"]["pid"], std::process::id());
    assert_eq!(item["pid"], orbit.pid().unwrap());
    assert_eq!((&item["figures"]["calls_total"], &item["state"]), (&3.into(), &"idle".into()));
}

#[test]
fn a_warm_server_is_shown_with_its_workers() {
    if !orrery_testing::is_there("python3") {
        return;
    }
    let _ = orrery_testing::built("orrery-warm-python");
    let scene = Scene::new();
    // At the default place of this user.
    let server = scene.start(&["warm", "serve", "--python", "--workers", "2"]);
    let name = scene.directory.path().canonicalize().unwrap().join("orrery-warm.socket");
    let name = name.to_str().unwrap().to_owned();
    let item = until("both workers are ready", || {
        let item = find(&scene.status(&["--kind", "warm"]), "warm", &name)?;
        (item["figures"]["workers_ready"] == 2).then_some(item)
    });
    assert_eq!(item["pid"], server.id());
    assert_eq!(item["command_line"][1], "warm");
    assert_eq!(item["parts"].as_array().unwrap().len(), 2);
    assert!(item["user"].is_string());
}

/// An HTTP server of this scene, and the address at which it listens.
fn http(scene: &Scene, command: &mut Command) -> (Killed, String) {
    let script = scene.path("script.py");
    std::fs::write(&script, "print('Content-Type: text/plain\\n\\nhello')").unwrap();
    let log = scene.path("http.log");
    command.arg("--script").arg(script).stderr(File::create(&log).unwrap());
    let server = Killed(command.spawn().unwrap());
    let address = until("the HTTP server listens", || {
        let log = std::fs::read_to_string(&log).unwrap();
        Some(log.split_once("listening on http://")?.1.split_once('\n')?.0.to_owned())
    });
    (server, address)
}

#[test]
fn an_http_server_is_shown_with_its_requests_and_its_warm_server() {
    if !orrery_testing::is_there("python3") {
        return;
    }
    let _ = (orrery_testing::built("orrery-warm-python"), orrery_testing::built("orrery-warm-http"));
    let scene = Scene::new();
    let arguments = ["warm", "http", "--listen", "127.0.0.1:0", "--health", "/up", "--reply-time", "2s"];
    let (server, address) = http(&scene, &mut scene.orrery(&arguments));
    let shown = |status: &Value| find(status, "http", &address);
    let get = || {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    assert!(get().starts_with("HTTP/1.0 503"));
    let item = shown(&scene.status(&["--kind", "http"])).unwrap();
    assert_eq!((&item["pid"], &item["state"]), (&server.id().into(), &"unready".into()), "{item}");
    assert_eq!(item["remark"], "its warm server is not there");
    let figures = &item["figures"];
    assert_eq!((&figures["requests_total"], &figures["requests_refused_total"]), (&1.into(), &1.into()));
    let warm = scene.start(&["warm", "serve", "--python", "--workers", "1"]);
    eventually("it serves", || get().contains("hello"));
    let item = until("it is idle", || {
        shown(&scene.status(&["--kind", "http"])).filter(|item| item["state"] == "idle")
    });
    assert_eq!((&item["figures"]["workers_ready"], &item["figures"]["warm_replies"]), (&1.into(), &1.into()));
    assert!(item["remark"].is_null() && item["figures"]["requests_total"].as_u64() >= Some(2), "{item}");
    let metrics = text(&scene.orrery(&["status", "--prometheus", "--kind", "http"]).output().unwrap());
    let has = |start: &str| metrics.lines().any(|line| line.starts_with(start) && line.contains(&address));
    assert!(has("orrery_http_requests_refused_total{") && has("orrery_http_info{"), "{metrics}");
    // Named by any path of its report.
    let named = format!("http={address}/up");
    scene.status(&["--kind", "http", "--socket", &named, "--check"]);
    // A warm server that is stopped is distinguished from one that is not there.
    signal(warm.id(), libc::SIGSTOP);
    let item = until("it does not reply", || {
        let item = shown(&scene.status(&["--kind", "http"]))?;
        (item["remark"] == "its warm server does not reply").then_some(item)
    });
    assert_eq!((&item["state"], &item["figures"]["warm_replies"]), (&"unready".into(), &0.into()));
    signal(warm.id(), libc::SIGCONT);
    let wrong = format!("http={address}/down");
    let output = scene.orrery(&["status", "--check", "--kind", "http", "--socket", &wrong]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("is no HTTP server"), "{output:?}");
    // In a network namespace of its own it is asked from within.
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can make a network namespace");
        return;
    }
    let mut command = Command::new("unshare");
    let plain = scene.orrery(&["warm", "http", "--listen", "0.0.0.0:0"]);
    command
        .args(["--net", "sh", "-c", "ip link set lo up && exec \"$0\" \"$@\""])
        .arg(plain.get_program())
        .args(plain.get_args());
    command.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let (server, address) = http(&scene, &mut command);
    let name = format!("/proc/{}/ns/net/{address}", server.id());
    let item = until("it is shown", || find(&scene.status(&["--kind", "http"]), "http", &name));
    assert_eq!(item["pid"], server.id());
}

#[test]
fn a_guard_is_shown_by_its_program() {
    let scene = Scene::new();
    let policy = scene.path("policy.toml");
    std::fs::write(&policy, "[files]\nread = ['/']\nexecute = ['/']\n").unwrap();
    let mut command = scene.orrery(&["guard", "--quiet", "--policy", policy.to_str().unwrap(), "--"]);
    let mut guard = Killed(command.args(["sleep", "1000"]).stderr(Stdio::piped()).spawn().unwrap());
    let item = until("the guard is shown, or has ended", || {
        if let Some(status) = guard.try_wait().unwrap() {
            return Some(Err(status));
        }
        let status = scene.status(&["--kind", "guard"]);
        let items = status["items"].as_array().unwrap();
        items.iter().find(|item| item["pid"] == guard.id() && item["name"] == "sleep").cloned().map(Ok)
    });
    match item {
        Ok(item) => {
            assert_eq!((&item["state"], &item["figures"]["processes"]), (&"guards".into(), &1.into()))
        }
        Err(status) => {
            let mut said = String::new();
            guard.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            orrery_testing::skipped!("nothing can be guarded here: {status}: {said}");
        }
    }
}

#[test]
fn a_server_that_does_not_answer_is_reported_within_the_limit() {
    let scene = Scene::new();
    let socket = scene.path("silent");
    // It takes connections, and says nothing.
    let listener = UnixListener::bind(scene.path("silent.control")).unwrap();
    let taken = std::thread::spawn(move || listener.accept().unwrap());
    let option = format!("warm={}", socket.display());
    let status = scene.status(&["--kind", "warm", "--socket", &option]);
    let unreadable = status["unreadable"].as_array().unwrap();
    let name = socket.to_str().unwrap();
    let one = unreadable.iter().find(|one| one["name"] == name).unwrap_or_else(|| panic!("{status}"));
    assert_eq!((&one["kind"], &one["reason"]), (&"warm".into(), &"no answer within 1 s".into()));
    drop(taken.join().unwrap());
    let output = scene.orrery(&["status", "--kind", "warm", "--socket", &option]).output().unwrap();
    assert!(text(&output).contains("Could not be asked:"), "{output:?}");
}

#[test]
fn nothing_is_no_error_and_nonsense_is_one() {
    let scene = Scene::new();
    // No test of this file has a pair.
    let none = text(&scene.orrery(&["status", "--kind", "orthros"]).output().unwrap());
    assert!(
        ["Nothing runs of these kinds: orthros.", "KIND", "Could not"]
            .iter()
            .any(|start| none.starts_with(start)),
        "{none}"
    );
    for (arguments, said) in [
        (&["status", "--socket", "guard=/x"][..], "the kind guard has no sockets"),
        (&["status", "--socket", "http=localhost"], "an HTTP server is written http=ADDRESS:PORT"),
        (&["status", "--kind", "guard", "--socket", "orc=/x"], "the kind is not selected"),
        (&["status", "--json", "--prometheus"], "cannot be used with"),
        (&["top"], "standard output is no terminal; use `orrery status`"),
        (&["top", "--interval", "0"], "choose 0.1 to 3600 seconds"),
    ] {
        let output = scene.orrery(arguments).output().unwrap();
        assert!(!output.status.success());
        assert!(String::from_utf8_lossy(&output.stderr).contains(said), "{output:?}");
    }
}

/// A pseudo terminal, whose screen is kept as a terminal would show it.
struct Screen {
    controller: File,
    /// Kept open, so that the screen stays when the program has ended.
    terminal: OwnedFd,
    parser: Arc<Mutex<vt100::Parser>>,
}

impl Screen {
    fn new() -> Self {
        let controller = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        rustix::pty::grantpt(&controller).unwrap();
        rustix::pty::unlockpt(&controller).unwrap();
        let name = rustix::pty::ptsname(&controller, Vec::new()).unwrap();
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC;
        let terminal = rustix::fs::open(name, flags, rustix::fs::Mode::empty()).unwrap();
        let (rows, columns) = (40, 160);
        tcsetwinsize(&terminal, Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 })
            .unwrap();
        rustix::io::fcntl_setfd(&controller, rustix::io::FdFlags::CLOEXEC).unwrap();
        let size = |value: u16| std::num::NonZeroU16::new(value).unwrap();
        let parser = Arc::new(Mutex::new(vt100::Parser::new(size(rows), size(columns), 0)));
        let controller = File::from(controller);
        let (mut output, written) = (controller.try_clone().unwrap(), Arc::clone(&parser));
        // It ends when the terminal is closed.
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                written.lock().unwrap().process(&bytes[..count]);
            }
        });
        Self { controller, terminal, parser }
    }

    /// Starts `orrery top` with this terminal for its controlling one.
    fn top(&self, scene: &Scene, arguments: &[&str]) -> Killed {
        let mut command = scene.orrery(&["top"]);
        command.args(arguments).env("TERM", "xterm-256color");
        let copy = || Stdio::from(self.terminal.try_clone().unwrap());
        command.stdin(copy()).stdout(copy()).stderr(copy());
        // SAFETY: system calls only.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                Ok(())
            })
        };
        Killed(command.spawn().unwrap())
    }

    fn shows(&self, what: &str) -> bool {
        self.parser.lock().unwrap().screen().contents().contains(what)
    }

    fn is_alternate(&self) -> bool {
        self.parser.lock().unwrap().screen().alternate_screen()
    }

    fn is_cursor_hidden(&self) -> bool {
        self.parser.lock().unwrap().screen().hide_cursor()
    }

    fn press(&mut self, keys: &str) {
        self.controller.write_all(keys.as_bytes()).unwrap();
    }

    fn modes(&self) -> Termios {
        tcgetattr(&self.terminal).unwrap()
    }

    fn assert_restored(&self, before: &Termios) {
        eventually("the screen is the one before", || !self.is_alternate() && !self.is_cursor_hidden());
        let after = self.modes();
        assert_eq!((after.local_modes, after.input_modes), (before.local_modes, before.input_modes));
        assert!(after.local_modes.contains(LocalModes::ECHO | LocalModes::ICANON));
    }
}

/// The last part of a path that a narrow column may cut off is not looked for.
fn beginning(path: &Path) -> String {
    path.to_str().unwrap().chars().take(24).collect()
}

#[test]
fn top_shows_a_store_and_restores_the_terminal() {
    let scene = Scene::new();
    let (_store, socket, _client) = scene.store();
    let mut screen = Screen::new();
    let before = screen.modes();
    let mut top = screen.top(&scene, &["--kind", "orc", "--kind", "guard", "--interval", "0.2"]);
    let line = format!("orc     serves   {}", beginning(&socket));
    eventually("the store's line is shown", || screen.shows(&line));
    assert!(screen.is_alternate());
    eventually("its details are shown", || screen.shows("charged"));
    screen.press("?");
    eventually("the keys are shown", || screen.shows("Shift+Tab"));
    screen.press("?p");
    eventually("it is paused", || screen.shows("paused") && !screen.shows("Shift+Tab"));
    screen.press("q");
    assert!(top.wait().unwrap().success());
    screen.assert_restored(&before);
}

#[test]
fn top_restores_the_terminal_when_it_is_asked_to_end() {
    let scene = Scene::new();
    let screen = Screen::new();
    let before = screen.modes();
    let mut top = screen.top(&scene, &["--kind", "orthros"]);
    eventually("it is drawn", || screen.is_alternate() && screen.shows("q quit"));
    assert!(!screen.modes().local_modes.contains(LocalModes::ICANON));
    signal(top.id(), libc::SIGTERM);
    assert!(top.wait().unwrap().success());
    screen.assert_restored(&before);
}
