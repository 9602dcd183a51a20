//! Three hosts behind nginx and behind HAProxy, configured as the book has it (`docs/src/warm-http.md`): network namespaces on a
//! bridge, each with a warm server and an HTTP server. SKIPPED without root, iproute2 or the balancer.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

mod common;

use std::fs;
use std::io::Write as _;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::warm::{Server, serve_command, settle_environment, signal};
use common::{Answer, WAY};
use orrery_testing::{PATIENCE, eventually, root, skipped};

/// The hosts of the configurations in the book, and the port of their HTTP servers.
const HOSTS: [&str; 3] = ["10.0.0.11", "10.0.0.12", "10.0.0.13"];
const PORT: u16 = 8000;
/// The address of the balancer.
const BALANCER: &str = "10.0.0.1";
/// How many requests there are at least.
const REQUESTS: usize = 500;
/// How many clients send them, one request after another each.
const CLIENTS: usize = 5;
/// How many of them there are at least while something is wrong.
const MEANWHILE: usize = 50;
/// How long nginx takes a server for failed (`fail_timeout` in the book), and a moment.
const FORGOTTEN: Duration = Duration::from_millis(3500);

/// Notes that it ran, under the number of its request, and answers with that.
const SCRIPT: &str = r#"
import os, sys, time
method = os.environ["REQUEST_METHOD"]
number = os.environ["QUERY_STRING"] if method == "GET" else sys.stdin.read()
with open(os.path.join(os.environ["FILES"], f"{method}-{number}"), "a") as file:
    file.write("x")
time.sleep(0.005)
print(f"Content-Type: text/plain\n\n{method} {number}", end="")
"#;

/// Runs ip(8), and returns what is wrong if it fails.
fn ip(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("ip").args(arguments).output().map_err(|error| format!("ip: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(format!("ip {}: {}", arguments.join(" "), said.trim())) }
}

/// A network namespace, removed when dropped.
struct Namespace(String);

impl Namespace {
    fn new(name: &str) -> Result<Self, String> {
        let name = format!("orrery-http-{}-{name}", std::process::id());
        ip(&["netns", "add", &name])?;
        let namespace = Self(name);
        namespace.ip(&["link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    fn ip(&self, arguments: &[&str]) -> Result<(), String> {
        ip(&[&["-netns", &self.0], arguments].concat())
    }

    /// Returns the command that does in the namespace what another does here.
    fn inside(&self, command: &Command) -> Command {
        // `ip` executes the program: the process is the program's.
        let place =
            ["/usr/sbin/ip", "/sbin/ip", "/usr/bin/ip"].into_iter().find(|path| Path::new(path).exists());
        let mut inside = Command::new(place.unwrap_or("ip"));
        settle_environment(&mut inside).stdin(Stdio::null());
        inside.args(["netns", "exec", &self.0]).arg(command.get_program()).args(command.get_args());
        inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        // SAFETY: a plain system call between fork and exec.
        unsafe {
            inside.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        inside
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = ip(&["netns", "delete", &self.0]) {
            eprintln!("{error}");
        }
    }
}

/// The network: a bridge, at which the balancer and the client are, and the hosts.
struct Network {
    hosts: Vec<Namespace>,
    middle: Namespace,
}

impl Network {
    fn new(balancer: &str) -> Result<Self, String> {
        let middle = Namespace::new(&format!("{balancer}-middle"))?;
        middle.ip(&["link", "add", "br0", "type", "bridge"])?;
        middle.ip(&["address", "add", &format!("{BALANCER}/24"), "dev", "br0"])?;
        middle.ip(&["link", "set", "br0", "up"])?;
        let mut hosts = Vec::new();
        for (index, address) in HOSTS.into_iter().enumerate() {
            let host = Namespace::new(&format!("{balancer}-{index}"))?;
            let port = format!("port{index}");
            middle.ip(&["link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &host.0])?;
            middle.ip(&["link", "set", &port, "master", "br0", "up"])?;
            host.ip(&["address", "add", &format!("{address}/24"), "dev", "eth0"])?;
            host.ip(&["link", "set", "eth0", "up"])?;
            hosts.push(host);
        }
        Ok(Self { hosts, middle })
    }

    /// Moves the calling thread to where the balancer is.
    fn enter(name: &str) {
        let space = fs::File::open(Path::new("/run/netns").join(name)).unwrap();
        let kind = rustix::thread::LinkNameSpaceType::Network;
        rustix::thread::move_into_link_name_space(space.as_fd(), Some(kind)).unwrap();
    }
}

/// A process that ends with its test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A host with its two servers.
struct Host<'a> {
    namespace: &'a Namespace,
    address: &'static str,
    warm: Server,
    http: Process,
    directory: PathBuf,
}

impl<'a> Host<'a> {
    fn start(namespace: &'a Namespace, address: &'static str, directory: &Path) -> Self {
        let own = tempfile::tempdir().unwrap();
        let serve = serve_command(WAY, &own.path().join("socket"), &["--workers", "2"]);
        let warm = Server::start_command(WAY, own, &mut namespace.inside(&serve));
        let http = Self::http(namespace, address, &warm, directory);
        Self { namespace, address, warm, http, directory: directory.to_owned() }
    }

    fn http(namespace: &Namespace, address: &str, warm: &Server, directory: &Path) -> Process {
        let mut command = common::command(directory, &warm.socket());
        command.args(["--listen", &format!("{address}:{PORT}"), "--drain", "2s", "--reply-time", "3s"]);
        let log = fs::OpenOptions::new().create(true).append(true).open(directory.join(address)).unwrap();
        Process(namespace.inside(&command).stderr(log).spawn().unwrap())
    }

    fn restart_http(&mut self) {
        self.http = Self::http(self.namespace, self.address, &self.warm, &self.directory);
    }

    fn restart_warm(&mut self) {
        let serve = serve_command(WAY, &self.warm.socket(), &["--workers", "2"]);
        self.warm.child = self.namespace.inside(&serve).stderr(Stdio::null()).spawn().unwrap();
    }

    fn signal(process: &Child, number: i32) {
        signal(i32::try_from(process.id()).unwrap(), number);
    }

    /// What its HTTP server has logged.
    fn log(&self) -> String {
        fs::read_to_string(self.directory.join(self.address)).unwrap()
    }
}

fn ask(address: &str, port: u16, request: &str) -> Option<Answer> {
    let address: SocketAddr = format!("{address}:{port}").parse().unwrap();
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(request.as_bytes()).ok()?;
    Some(Answer::read(stream))
}

fn report(address: &str) -> Option<Answer> {
    ask(address, PORT, "GET /-/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
}

fn health(address: &str) -> u16 {
    report(address).map_or(0, |answer| answer.status)
}

/// What a client saw of a request; every other one of a client is POST.
struct Seen {
    method: &'static str,
    number: usize,
    answer: Option<Answer>,
    /// Whether it was sent while a warm server was stopped, which was not noticed yet.
    is_early: bool,
}

fn send(number: usize, stopped: &AtomicBool) -> Seen {
    let end = "Host: scripts\r\nConnection: close\r\n";
    let (method, request) = if (number / CLIENTS).is_multiple_of(2) {
        ("GET", format!("GET /note.py?{number} HTTP/1.1\r\n{end}\r\n"))
    } else {
        let body = number.to_string();
        ("POST", format!("POST /note.py HTTP/1.1\r\n{end}Content-Length: {}\r\n\r\n{body}", body.len()))
    };
    let is_early = stopped.load(Ordering::SeqCst);
    let answer = ask(BALANCER, 80, &request);
    Seen { method, number, answer, is_early: is_early || stopped.load(Ordering::SeqCst) }
}

/// Returns the only block of a language in the chapter.
fn block(language: &str) -> String {
    let chapter = fs::read_to_string(root().join("docs/src/warm-http.md")).unwrap();
    let (_, rest) = chapter.split_once(&format!("\n```{language}\n")).unwrap();
    let (block, rest) = rest.split_once("\n```\n").unwrap();
    assert!(!rest.contains(&format!("\n```{language}\n")), "the chapter has several blocks of {language}");
    format!("{block}\n")
}

/// Sends requests through a balancer while one host after another is drained, loses its HTTP server, loses its
/// warm server, and has that stopped.
fn balance(balancer: &str, command: impl FnOnce(&Path) -> Command) {
    if !rustix::process::geteuid().is_root() {
        skipped!("only root can make network namespaces");
        return;
    }
    let network = match Network::new(balancer) {
        Ok(network) => network,
        Err(error) => {
            skipped!("cannot make a network of namespaces: {error}");
            return;
        }
    };
    let scene = common::directory();
    let directory = scene.path();
    fs::write(directory.join("scripts/note.py"), SCRIPT).unwrap();
    let spaces = network.hosts.iter().zip(HOSTS);
    let mut hosts: Vec<_> = spaces.map(|(space, address)| Host::start(space, address, directory)).collect();
    let balancing =
        network.middle.inside(&command(directory)).stderr(Stdio::null()).stdout(Stdio::null()).spawn();
    let balancing = Process(balancing.unwrap());

    let middle = network.middle.0.clone();
    let (sent, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let stopped = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        // Whoever panics stops the client, which the scope waits for.
        struct StopOnDrop(Arc<AtomicBool>);
        impl Drop for StopOnDrop {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let stopping = StopOnDrop(Arc::clone(&stop));
        let (middle, sent, stop, stopped) = (&middle, &sent, &stop, &stopped);
        let client = move |index: usize| {
            Network::enter(middle);
            eventually("the balancer serves", || {
                send(0, stopped).answer.is_some_and(|answer| answer.status == 200)
            });
            let mut seen = Vec::new();
            while !stop.load(Ordering::Relaxed) || seen.len() < REQUESTS / CLIENTS {
                seen.push(send(1 + index + CLIENTS * seen.len(), stopped));
                sent.fetch_add(1, Ordering::Relaxed);
            }
            seen
        };
        let clients: Vec<_> = (0..CLIENTS).map(|index| scope.spawn(move || client(index))).collect();
        let has_failed = || clients.iter().any(|client| client.is_finished());
        let some_requests = || {
            let before = sent.load(Ordering::Relaxed);
            eventually("requests are sent", || {
                has_failed() || sent.load(Ordering::Relaxed) >= before + MEANWHILE
            });
            assert!(!has_failed(), "a client has failed");
        };
        Network::enter(middle);
        let healthy = |host: &Host<'_>| {
            eventually("the host is healthy", || health(host.address) == 200);
            // Then its balancer takes note of it, while requests go on.
            std::thread::sleep(FORGOTTEN);
        };
        some_requests();

        let host = &mut hosts[0];
        Host::signal(&host.http.0, libc::SIGTERM);
        eventually("the host drains", || health(host.address) != 200);
        some_requests();
        assert!(host.http.0.wait().unwrap().success());
        some_requests();
        host.restart_http();
        healthy(host);
        some_requests();

        let host = &mut hosts[1];
        Host::signal(&host.http.0, libc::SIGKILL);
        host.http.0.wait().unwrap();
        some_requests();
        host.restart_http();
        healthy(host);
        some_requests();

        let host = &mut hosts[2];
        Host::signal(&host.warm.child, libc::SIGTERM);
        host.warm.child.wait().unwrap();
        assert_eq!(health(host.address), 503);
        some_requests();
        host.restart_warm();
        healthy(host);
        some_requests();

        let host = &hosts[0];
        let workers = host.warm.workers();
        let signal_all = |number| {
            workers.iter().for_each(|worker| signal(*worker, number));
            Host::signal(&host.warm.child, number);
        };
        stopped.store(true, Ordering::SeqCst);
        signal_all(libc::SIGSTOP);
        eventually("it is noticed, and nothing waits any more", || {
            let report = report(host.address).unwrap();
            host.log().contains("the warm server has not replied for")
                && report.text().contains(r#""requests":0,"#)
        });
        assert_eq!(health(host.address), 503);
        stopped.store(false, Ordering::SeqCst);
        some_requests();
        signal_all(libc::SIGCONT);
        healthy(host);
        some_requests();

        drop(stopping);
        clients.into_iter().flat_map(|client| client.join().unwrap()).collect::<Vec<_>>()
    });
    drop(balancing);
    assert!(seen.len() >= REQUESTS);
    let logs = || HOSTS.map(|host| fs::read_to_string(directory.join(host)).unwrap()).join("\n---\n");
    let mut posts = [0, 0];
    for Seen { method, number, answer, is_early } in &seen {
        let ran = fs::read_to_string(directory.join(format!("files/{method}-{number}")))
            .map_or(0, |text| text.len());
        let succeeded = answer.as_ref().is_some_and(|answer| answer.status == 200);
        if succeeded {
            assert_eq!(answer.as_ref().unwrap().text(), format!("{method} {number}"));
        }
        match *method {
            "GET" if *is_early && !succeeded => {
                assert_eq!(
                    answer.as_ref().map(|answer| answer.status),
                    Some(504),
                    "GET {number}: {answer:?}"
                );
            }
            "GET" => assert!(succeeded && ran >= 1, "GET {number} ran {ran} times: {answer:?}\n{}", logs()),
            _ => {
                assert!(ran <= 1 && (!succeeded || ran == 1), "POST {number} ran {ran} times: {answer:?}");
                posts[usize::from(succeeded)] += 1;
            }
        }
    }
    eprintln!(
        "{balancer}: {} requests; of {} POST, {} were answered with an error",
        seen.len(),
        posts[0] + posts[1],
        posts[0]
    );
    assert!(posts[1] > posts[0], "most requests are not disturbed at all: {posts:?}");
}

#[test]
fn hosts_behind_nginx_come_and_go_and_idempotent_requests_succeed() {
    if !Path::new("/usr/sbin/nginx").exists() {
        skipped!("there is no nginx: install the package nginx");
        return;
    }
    balance("nginx", |directory| {
        let place = directory.display();
        let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {place}/{name};\n"))
            .concat();
        let text = format!(
            "daemon off;\nuser root;\npid {place}/nginx.pid;\nerror_log {place}/nginx.log;\nevents {{}}\n\
             http {{\naccess_log off;\n{temporary}{}}}\n",
            block("nginx")
        );
        let file = directory.join("nginx.conf");
        fs::write(&file, text).unwrap();
        let mut command = Command::new("/usr/sbin/nginx");
        command.arg("-p").arg(directory).arg("-c").arg(file).args(["-e", "stderr"]);
        command
    });
}

#[test]
fn hosts_behind_haproxy_come_and_go_and_idempotent_requests_succeed() {
    if !Path::new("/usr/sbin/haproxy").exists() {
        skipped!("there is no HAProxy: install the package haproxy");
        return;
    }
    balance("haproxy", |directory| {
        let file = directory.join("haproxy.cfg");
        fs::write(&file, block("haproxy")).unwrap();
        let mut command = Command::new("/usr/sbin/haproxy");
        command.args(["-db", "-f"]).arg(file);
        command
    });
}
