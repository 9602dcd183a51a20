//! Servers of others, whose clients check every answer while a kernel panics and another one hangs. They run where `ORRERY_SERVICES` is set, as
//! `make soak` does. SKIPPED where QEMU, criu, a kernel, root or the program are absent.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "orthros/pairs.rs"]
mod pairs;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pairs::{ONE_PAIR, Up, connect, get, missing};

/// How many connections ask at the same time.
const CLIENTS: usize = 4;

/// Sends a line for each line that it gets: how many it has got.
const COUNT_GO: &str = r#"package main
import("bufio";"fmt";"net")
func main(){l,_:=net.Listen("tcp","0.0.0.0:9000");for{c,e:=l.Accept();if e!=nil{continue};go func(){r:=bufio.NewReader(c);n:=0
for{if _,e:=r.ReadString('\n');e!=nil{return};n++;fmt.Fprintf(c,"%d\n",n)}}()}}
"#;
const COUNT_JAVA: &str = r#"import java.io.*;
import java.net.*;
public class Count {
    public static void main(String[] a) throws Exception {
        ServerSocket s = new ServerSocket(9000);
        while (true) {
            Socket c = s.accept();
            new Thread(() -> {
                try {
                    BufferedReader r = new BufferedReader(new InputStreamReader(c.getInputStream()));
                    for (int n = 1; r.readLine() != null; n++) {
                        c.getOutputStream().write((n + "\n").getBytes());
                    }
                } catch (IOException e) {
                }
            }).start();
        }
    }
}
"#;
const COUNT_JAVASCRIPT: &str = r"require('net').createServer(c => {
    let n = 0;
    c.on('data', d => { for (const b of d) if (b == 10) c.write(++n + '\n'); });
    c.on('error', () => {});
}).listen(9000, '0.0.0.0');
";
const COUNT_PYTHON: &str = r"import asyncio, threading, time
async def serve(reader, writer):
    n = 0
    while await reader.readline():
        n += 1
        writer.write(b'%d\n' % n)
        await writer.drain()
def count():
    while True:
        time.sleep(0.05)
for _ in range(4):
    threading.Thread(target=count, daemon=True).start()
async def main():
    async with await asyncio.start_server(serve, '0.0.0.0', 9000) as server:
        await server.serve_forever()
asyncio.run(main())
";

/// What a client asks over a connection.
type Ask = fn(&mut BufReader<TcpStream>, client: u64, round: u64);

fn line(connection: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    assert!(connection.read_line(&mut line).unwrap() > 0, "the connection is closed");
    line.trim_end().to_owned()
}

fn say(connection: &mut BufReader<TcpStream>, words: &str) {
    connection.get_mut().write_all(words.as_bytes()).unwrap();
}

fn count(connection: &mut BufReader<TcpStream>, _: u64, round: u64) {
    say(connection, "+\n");
    assert_eq!(line(connection), (round + 1).to_string());
}

fn memcached(connection: &mut BufReader<TcpStream>, client: u64, round: u64) {
    let value = format!("{client}-{round}");
    say(connection, &format!("set k{client} 0 0 {}\r\n{value}\r\nget k{client}\r\n", value.len()));
    assert_eq!(line(connection), "STORED");
    assert_eq!(line(connection), format!("VALUE k{client} 0 {}", value.len()));
    assert_eq!((line(connection), line(connection)), (value, "END".to_owned()));
}

fn beanstalkd(connection: &mut BufReader<TcpStream>, client: u64, round: u64) {
    let value = format!("{client}-{round}");
    say(connection, &format!("put 0 0 60 {}\r\n{value}\r\n", value.len()));
    let inserted = line(connection);
    let job = inserted.strip_prefix("INSERTED ").unwrap();
    say(connection, &format!("peek {job}\r\n"));
    assert_eq!(line(connection), format!("FOUND {job} {}", value.len()));
    assert_eq!(line(connection), value);
    say(connection, &format!("delete {job}\r\n"));
    assert_eq!(line(connection), "DELETED");
}

fn lighttpd(connection: &mut BufReader<TcpStream>, client: u64, round: u64) {
    assert_eq!(get(connection, &format!("page?{client}-{round}")), "a page\n");
}

/// Publishes a message of MQTT 3.1.1 to itself, which the server acknowledges and sends back.
fn mosquitto(connection: &mut BufReader<TcpStream>, client: u64, round: u64) {
    let text = |words: &str| [&[0, u8::try_from(words.len()).unwrap()], words.as_bytes()].concat();
    let packet = |kind: u8, body: &[u8]| [&[kind, u8::try_from(body.len()).unwrap()], body].concat();
    let receive = |connection: &mut BufReader<TcpStream>| {
        let mut head = [0; 2];
        connection.read_exact(&mut head).unwrap();
        let mut body = vec![0; usize::from(head[1])];
        connection.read_exact(&mut body).unwrap();
        (head[0], body)
    };
    let topic = format!("t{client}");
    if round == 0 {
        let body = [&text("MQTT")[..], &[4, 2, 0, 0], &text(&topic)].concat();
        connection.get_mut().write_all(&packet(0x10, &body)).unwrap();
        assert_eq!(receive(connection), (0x20, vec![0, 0]));
        let body = [&[0, 1][..], &text(&topic), &[0]].concat();
        connection.get_mut().write_all(&packet(0x82, &body)).unwrap();
        assert_eq!(receive(connection), (0x90, vec![0, 1, 0]));
    }
    let (value, number) =
        (format!("{client}-{round}"), u16::try_from(round % 60_000 + 1).unwrap().to_be_bytes());
    let body = [&text(&topic)[..], &number, value.as_bytes()].concat();
    connection.get_mut().write_all(&packet(0x32, &body)).unwrap();
    let mut received = [receive(connection), receive(connection)];
    received.sort_unstable();
    let message = [&text(&topic)[..], value.as_bytes()].concat();
    assert_eq!(received, [(0x30, message), (0x40, number.to_vec())]);
}

/// Runs a service in a pair through a panic and a hang, while clients check its answers.
fn serves_through_panic_and_hang(options: &[&str], service: &[&str], port: u16, ask: Ask) {
    let _one = ONE_PAIR.lock();
    let network = format!("orrery-services-{}", std::process::id());
    let mut up = Up::start(&[&["--network", &network], options].concat(), service);
    up.expect("help");
    let (ends, answers) = (AtomicBool::new(false), [(); CLIENTS].map(|()| AtomicU64::new(0)));
    let progress = |what: &str| {
        let before: Vec<u64> = answers.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let deadline = Instant::now() + Duration::from_secs(180);
        while answers.iter().zip(&before).any(|(now, &before)| now.load(Ordering::Relaxed) < before + 20) {
            assert!(
                Instant::now() < deadline,
                "{what}: clients get no answers, beyond {before:?}: {answers:?}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..)
            .zip(&answers)
            .map(|(client, count)| {
                let (network, ends) = (&network, &ends);
                scope.spawn(move || {
                    let stream = connect(network, port);
                    stream.set_read_timeout(Some(Duration::from_secs(180))).unwrap();
                    stream.set_nodelay(true).unwrap();
                    let mut connection = BufReader::new(stream);
                    while !ends.load(Ordering::Relaxed) {
                        let round = count.load(Ordering::Relaxed);
                        ask(&mut connection, client, round);
                        count.store(round + 1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(10));
                    }
                })
            })
            .collect();
        // Without this the others would wait for clients for ever.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            progress("at first");
            for kind in ["panic", "hang"] {
                up.say(&format!("crash {kind}"));
                let survived = up.expect("survived");
                assert_eq!(survived["failover"]["summary"]["remarks"].to_string(), "[]", "{kind}");
                progress(kind);
                up.expect("renewed");
            }
        }));
        ends.store(true, Ordering::Relaxed);
        for client in clients {
            client.join().unwrap();
        }
        result.unwrap();
    });
    up.say("quit");
    up.expect("end");
}

/// Returns whether a service is to be run here.
fn is_wanted(programs: &[(&str, &'static str)]) -> bool {
    let why = match std::env::var_os("ORRERY_SERVICES") {
        None => Some("ORRERY_SERVICES=1 runs it".to_owned()),
        Some(_) => missing(&[&[("ip", "iproute2")], programs].concat()),
    };
    if let Some(why) = &why {
        orrery_testing::skipped!("{why}");
    }
    why.is_none()
}

/// Returns a new directory with a file, and the path of that.
fn with_file(name: &str, text: &str) -> (tempfile::TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(name);
    std::fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap().to_owned();
    (directory, path)
}

fn run(program: &str, arguments: &[&str], directory: &Path) {
    let mut command = std::process::Command::new(program);
    command
        .args(arguments)
        .current_dir(directory)
        .env("CGO_ENABLED", "0")
        .env("GOCACHE", directory.join("cache"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Go's servers listen by MPTCP where they can.
#[test]
fn go_counts_on() {
    if !is_wanted(&[("go", "golang-go")]) {
        return;
    }
    let (directory, _) = with_file("count.go", COUNT_GO);
    run("go", &["build", "-o", "count", "count.go"], directory.path());
    let file = format!("{}:/srv/count", directory.path().join("count").display());
    serves_through_panic_and_hang(&["--file", &file], &["sh", "-c", "exec /srv/count"], 9000, count);
}

#[test]
fn java_counts_on() {
    if !is_wanted(&[("javac", "default-jdk-headless")]) {
        return;
    }
    let (directory, _) = with_file("Count.java", COUNT_JAVA);
    run("javac", &["Count.java"], directory.path());
    // The program finds its libraries from its own place.
    let java = std::fs::canonicalize("/usr/bin/java").unwrap();
    let home = java.ancestors().nth(2).unwrap();
    let settings =
        Path::new("/etc").join(home.file_name().unwrap().to_str().unwrap().trim_end_matches("-amd64"));
    let mut options = vec!["--memory".to_owned(), "1024".to_owned()];
    for file in [home, &settings].into_iter().filter(|path| path.exists()) {
        options.extend(["--file".to_owned(), file.to_str().unwrap().to_owned()]);
    }
    options.extend([
        "--file".to_owned(),
        format!("{}:/srv/Count.class", directory.path().join("Count.class").display()),
    ]);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    serves_through_panic_and_hang(&options, &[java.to_str().unwrap(), "-cp", "/srv", "Count"], 9000, count);
}

#[test]
fn node_counts_on() {
    if !is_wanted(&[("node", "nodejs")]) {
        return;
    }
    let (_directory, path) = with_file("count.js", COUNT_JAVASCRIPT);
    let options = ["--memory", "512", "--file", &format!("{path}:/srv/count.js")];
    serves_through_panic_and_hang(&options, &["node", "/srv/count.js"], 9000, count);
}

#[test]
fn python_counts_on() {
    if !is_wanted(&[("/usr/bin/python3", "python3")]) {
        return;
    }
    let (_directory, path) = with_file("count.py", COUNT_PYTHON);
    let python = std::fs::canonicalize("/usr/bin/python3").unwrap();
    let library = Path::new("/usr/lib").join(python.file_name().unwrap());
    let options =
        ["--memory", "512", "--file", library.to_str().unwrap(), "--file", &format!("{path}:/srv/count.py")];
    serves_through_panic_and_hang(&options, &[python.to_str().unwrap(), "/srv/count.py"], 9000, count);
}

#[test]
fn memcached_keeps_its_values() {
    if is_wanted(&[("memcached", "memcached")]) {
        let service = ["memcached", "-u", "root", "-l", "0.0.0.0"];
        serves_through_panic_and_hang(&[], &service, 11211, memcached);
    }
}

#[test]
fn beanstalkd_keeps_its_jobs() {
    if is_wanted(&[("beanstalkd", "beanstalkd")]) {
        serves_through_panic_and_hang(&[], &["beanstalkd", "-l", "0.0.0.0"], 11300, beanstalkd);
    }
}

#[test]
fn lighttpd_keeps_its_connections() {
    if !is_wanted(&[("lighttpd", "lighttpd")]) {
        return;
    }
    let text = "server.document-root = \"/srv\"\nserver.max-keep-alive-requests = 1000000\n\
                server.errorlog = \"/srv/log\"\nserver.modules = ()\n";
    let (directory, path) = with_file("lighttpd.conf", text);
    let page = directory.path().join("page");
    std::fs::write(&page, "a page\n").unwrap();
    let (configuration, page) =
        (format!("{path}:/srv/lighttpd.conf"), format!("{}:/srv/page", page.display()));
    let modules = "/usr/lib/lighttpd";
    let options = ["--file", &configuration, "--file", &page, "--file", modules];
    serves_through_panic_and_hang(&options, &["lighttpd", "-D", "-f", "/srv/lighttpd.conf"], 80, lighttpd);
}

#[test]
fn mosquitto_delivers_every_message() {
    if !is_wanted(&[("mosquitto", "mosquitto")]) {
        return;
    }
    let (_directory, path) =
        with_file("mosquitto.conf", "listener 1883 0.0.0.0\nallow_anonymous true\nuser root\n");
    let options = ["--file", &format!("{path}:/srv/mosquitto.conf")];
    serves_through_panic_and_hang(&options, &["mosquitto", "-c", "/srv/mosquitto.conf"], 1883, mosquitto);
}
