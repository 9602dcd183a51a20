//! `orrery orthros` and its host: a bridge that is there, a disk that is in use, requests that come at once, the commands of the book.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "orthros/pairs.rs"]
mod pairs;

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use orrery_orthros_host::{Pair, PairConfig, Service};
use orrery_testing::Killed;
use pairs::{ONE_PAIR, ORRERY, Up, cache, events, missing, orthros};

const PATIENCE: Duration = Duration::from_secs(120);

/// Ends with what it stands for.
struct Running(Killed);

impl Running {
    /// Starts a pair and waits until it says that the service runs.
    fn up(mut command: Command) -> Self {
        let mut running = Self(Killed(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()));
        let mut lines = BufReader::new(running.0.stdout.take().unwrap()).lines();
        let armed = lines.by_ref().map(|line| line.unwrap()).any(|line| line.contains("the service runs"));
        assert!(armed, "it ended before the service ran");
        // What it tells further on is nobody's, and must go somewhere.
        std::thread::spawn(move || lines.count());
        running
    }
}

fn ip(words: &[&str]) -> String {
    let output = Command::new("ip").args(words).output().unwrap();
    assert!(output.status.success(), "ip {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A host with a bridge, and a client of another network that reaches it through the host, both in namespaces.
struct Lan {
    host: String,
    client: String,
}

impl Lan {
    const BRIDGE: &str = "br-lan";
    const ADDRESS: &str = "192.168.77.7/24";

    fn new(name: &str) -> Self {
        let number = std::process::id();
        let lan =
            Self { host: format!("orrery-{name}-{number}"), client: format!("orrery-{name}-{number}-c") };
        let (host, client) = (lan.host.as_str(), lan.client.as_str());
        ip(&["netns", "add", host]);
        ip(&["netns", "add", client]);
        ip(&["-n", host, "link", "set", "lo", "up"]);
        ip(&["-n", host, "link", "add", Self::BRIDGE, "type", "bridge"]);
        ip(&["-n", host, "address", "add", "192.168.77.1/24", "dev", Self::BRIDGE]);
        ip(&["-n", host, "link", "set", Self::BRIDGE, "up"]);
        ip(&["-n", host, "link", "add", "out", "type", "veth", "peer", "name", "in", "netns", client]);
        for (space, device, address) in [(host, "out", "172.30.77.1/24"), (client, "in", "172.30.77.2/24")] {
            ip(&["-n", space, "address", "add", address, "dev", device]);
            ip(&["-n", space, "link", "set", device, "up"]);
        }
        ip(&["-n", client, "route", "add", "default", "via", "172.30.77.1"]);
        ip(&["netns", "exec", host, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]);
        lan
    }

    /// Returns the command, on this host.
    fn orthros(&self) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.host, ORRERY, "orthros"]).env("ORRERY_CACHE", cache());
        command
    }

    /// Returns a connection from the client to the service.
    fn connect(&self, port: u16) -> TcpStream {
        let space = std::fs::File::open(Path::new("/run/netns").join(&self.client)).unwrap();
        // A socket stays in the network that its thread was in.
        let connected = std::thread::spawn(move || {
            let kind = rustix::thread::LinkNameSpaceType::Network;
            rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&space), Some(kind)).unwrap();
            let begin = Instant::now();
            loop {
                match TcpStream::connect(("192.168.77.7", port)) {
                    Ok(stream) => return stream,
                    Err(error) => assert!(begin.elapsed() < PATIENCE, "{error}"),
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let stream = connected.join().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }
}

impl Drop for Lan {
    fn drop(&mut self) {
        for name in [&self.host, &self.client] {
            let _ = Command::new("ip").args(["netns", "delete", name]).status();
        }
    }
}

/// Returns what a command says that must fail and print nothing else.
fn refused(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A client of another network, through a gateway; the bridge is the host's, and so is the disk's image, which nobody else
/// can take meanwhile.
#[test]
fn a_service_has_a_place_on_a_bridge_of_the_hosts() {
    if let Some(why) = missing(&[("mkfs.ext4", "e2fsprogs"), ("ip", "iproute2")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let lan = Lan::new("lan");
    let directory = tempfile::tempdir().unwrap();
    let (image, at) = (directory.path().join("image"), directory.path().join("pair"));
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    assert!(Command::new("mkfs.ext4").arg("-q").arg(&image).status().unwrap().success());
    let file = directory.path().join("pair.toml");
    let text = format!(
        "service = ['orrery-orthros-load', 'ballast', '1', '0', '0']\nbridge = '{}'\naddress = '{}'\ngateway = '192.168.77.1'\n\
         silence = 60\ndirectory = '{}'\nappend = 'orrery.test=yes'\n[disk]\nimage = '{}'\n",
        Lan::BRIDGE,
        Lan::ADDRESS,
        at.display(),
        image.display()
    );
    std::fs::write(&file, text).unwrap();
    let mut command = lan.orthros();
    command.args(["up", "--quiet", "--config"]).arg(&file);
    let _pair = Running::up(command);
    let mut stream = lan.connect(7);
    let mut answers = BufReader::new(stream.try_clone().unwrap());
    let mut ask = |expected: u32| {
        stream.write_all(b"\n").unwrap();
        let mut answer = String::new();
        answers.read_line(&mut answer).unwrap();
        assert_eq!(answer.trim(), expected.to_string());
    };
    let tell = |words: &[&str]| {
        let output = orthros().args(words).args(["--json", "--directory"]).arg(&at).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        events(&output.stdout)
    };
    ask(1);
    // Neither its disk nor its address is anyone else's.
    let service = ["--", "orrery-orthros-load", "counter", "/run/count"];
    let told = refused(orthros().arg("up").arg("--disk").arg(&image).args(service));
    assert!(told.contains("lock") && told.contains("image"), "{told}");
    let told =
        refused(lan.orthros().args(["up", "--bridge", Lan::BRIDGE, "--address", Lan::ADDRESS]).args(service));
    assert!(told.contains("192.168.77.7 is in use, by the card 52:54:c0:a8:4d:07"), "{told}");
    ask(2);
    let happened = tell(&["crash"]);
    assert!(happened.iter().any(|event| event["event"] == "survived"), "{happened:?}");
    ask(3);
    let happened = tell(&["failover"]);
    assert!(happened.iter().any(|event| event["event"] == "survived"), "{happened:?}");
    ask(4);
    tell(&["down"]);
    let ports = ip(&["-n", &lan.host, "link", "show", "master", Lan::BRIDGE]);
    assert!(ports.is_empty() && !ip(&["-n", &lan.host, "link"]).contains("tap"), "{ports}");
}

#[test]
fn what_a_bridge_cannot_give_is_told_and_nothing_is_changed() {
    if let Some(why) = missing(&[("ip", "iproute2")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let lan = Lan::new("bad");
    let told = |bridge: &str, address: &str| {
        let words = ["up", "--bridge", bridge, "--address", address, "--", "true"];
        refused(lan.orthros().args(words))
    };
    assert!(told("br-none", Lan::ADDRESS).contains("no bridge of this name"));
    assert!(told("out", Lan::ADDRESS).contains("no bridge of this name"), "a card is no bridge");
    assert!(told(Lan::BRIDGE, "192.168.77.1/24").contains("an address of this host's"));
    // Someone else on the bridge has it.
    ip(&["-n", &lan.host, "link", "set", "out", "master", Lan::BRIDGE]);
    ip(&["-n", &lan.client, "address", "add", "192.168.77.9/24", "dev", "in"]);
    let card = ip(&["-n", &lan.client, "link", "show", "dev", "in"]);
    let card = card.split_whitespace().skip_while(|&word| word != "link/ether").nth(1).unwrap().to_owned();
    let said = told(Lan::BRIDGE, "192.168.77.9/24");
    assert!(said.contains("192.168.77.9 is in use") && said.contains(&card), "{said}");
    ip(&["-n", &lan.host, "link", "set", Lan::BRIDGE, "type", "bridge", "stp_state", "1"]);
    assert!(told(Lan::BRIDGE, Lan::ADDRESS).contains("stp_state 0"));
    ip(&["-n", &lan.host, "link", "set", Lan::BRIDGE, "down"]);
    ip(&["-n", &lan.host, "link", "set", Lan::BRIDGE, "type", "bridge", "stp_state", "0"]);
    assert!(told(Lan::BRIDGE, Lan::ADDRESS).contains("cannot be asked"));
    // What has to be said together.
    let words = |words: &[&str]| refused(lan.orthros().arg("up").args(words).args(["--", "true"]));
    assert!(words(&["--bridge", "br0"]).contains("--address"));
    assert!(words(&["--address", Lan::ADDRESS]).contains("--bridge"));
    assert!(words(&["--bridge", "br0", "--address", "192.168.77.7"]).contains("192.168.1.7/24"));
    assert!(
        words(&["--bridge", "br0", "--network", "n", "--address", Lan::ADDRESS]).contains("cannot be used")
    );
}

/// Returns what a line of /proc/PID/status says.
fn field<'s>(status: &'s str, name: &str) -> Vec<&'s str> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name}: {status}")).split_whitespace().collect()
}

/// The distribution's own unit, found by its name, with a drop-in by which others reach it. Whoever it says that runs it, with the limits
/// and in the directories that it says, goes on as the same in the next kernel.
#[test]
fn a_units_service_is_what_its_unit_says_and_survives_as_that() {
    let programs = [("redis-server", "redis-server"), ("mkfs.ext4", "e2fsprogs"), ("ip", "iproute2")];
    if let Some(why) = missing(&programs) {
        orrery_testing::skipped!("{why}");
        return;
    }
    if !Path::new("/lib/systemd/system/redis-server.service").is_file() {
        orrery_testing::skipped!("redis-server's unit is not installed");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let drop_ins = directory.path().join("redis-server.service.d");
    std::fs::create_dir(&drop_ins).unwrap();
    let drop_in = "[Service]\nExecStart=\nExecStart=/usr/bin/redis-server $CONF --daemonize no --bind 0.0.0.0 \\\n\
                   # for all\n  --protected-mode ${PROTECTED}\nEnvironment=CONF=/etc/redis/redis.conf PROTECTED=no\n\
                   ExecStartPre=/bin/sh -c 'id -un > $$RUNTIME_DIRECTORY/before'\n";
    std::fs::write(drop_ins.join("own.conf"), drop_in).unwrap();
    let network = format!("orrery-unit-{}", std::process::id());
    let mut command = orthros();
    command.args(["run", "--json", "--unit", "redis-server", "--network", &network, "--silence", "60"]);
    command.args(["--disk", "64M", "--mount", "/var/lib/redis"]);
    // The directory first, and then where units are.
    command.env("SYSTEMD_UNIT_PATH", format!("{}:", directory.path().display()));
    let mut up = Up::begin(command);
    let told: Vec<String> = (0..5).map(|_| up.expect("unit")["text"].as_str().unwrap().to_owned()).collect();
    assert!(told[0].contains("own.conf: redis runs /usr/bin/redis-server /etc/redis/redis.conf"), "{told:?}");
    assert!(told[1].starts_with("taken along: ") && told[1].contains("/etc/redis/redis.conf"), "{told:?}");
    assert!(told[2].contains("/run/redis") && told[2].contains("/var/lib/redis"), "{told:?}");
    assert!(told[3].contains("Type=notify"), "{told:?}");
    assert!(told[4].contains("not applied: ") && told[4].contains("ProtectSystem"), "{told:?}");
    up.expect("help");
    let stream = pairs::connect(&network, 6379);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut client = BufReader::new(stream);
    let mut ask = |line: &str| {
        write!(client.get_mut(), "{line}\r\n").unwrap();
        let mut answer = String::new();
        client.read_line(&mut answer).unwrap();
        answer.trim().to_owned()
    };
    assert_eq!(ask("set key 41"), "+OK");
    let look = |up: &mut Up| {
        up.say("status");
        let pid = up.expect("status")["status"]["service"].as_i64().unwrap();
        let mut run = |line: String| {
            up.say(&format!("run {line}"));
            up.expect("ran")["text"].as_str().unwrap().to_owned()
        };
        let status = run(format!("cat /proc/{pid}/status"));
        let ids = run("busybox id -u redis".to_owned()) + ":" + &run("busybox id -g redis".to_owned());
        let (uid, gid) = ids.split_once(':').unwrap();
        assert_eq!((field(&status, "Uid"), field(&status, "Gid")), (vec![uid; 4], vec![gid; 4]));
        assert_eq!(field(&status, "Groups"), [gid]);
        assert_eq!((field(&status, "Umask"), field(&status, "NoNewPrivs")), (vec!["0007"], vec!["1"]));
        let limits = run(format!("cat /proc/{pid}/limits"));
        let files = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        assert_eq!(files.split_whitespace().filter(|&word| word == "65535").count(), 2, "{limits}");
        // Its directories are its own, the disk's, too; what it runs from is as it is on this host.
        let places = "/run/redis /run/redis/before /var/lib/redis /etc/redis/redis.conf";
        let owners = run(format!("busybox stat -c %U:%G:%a {places}"));
        let host = ["-c", "%U:%G:%a", "/var/lib/redis", "/etc/redis/redis.conf"];
        let host = Command::new("stat").args(host).output().unwrap().stdout;
        let host = String::from_utf8(host).unwrap();
        assert_eq!(owners, format!("redis:redis:2755\nredis:redis:660\n{}", host.trim_end()));
        assert_eq!(run("cat /run/redis/before".to_owned()), "redis");
    };
    look(&mut up);
    up.say("crash panic");
    let survived = up.expect("survived");
    assert_eq!(survived["failover"]["summary"]["connections"], 1, "{survived}");
    assert_eq!((ask("incr key"), ask("save")), (":42".to_owned(), "+OK".to_owned()));
    up.expect("renewed");
    look(&mut up);
    up.say("quit");
    up.expect("end");
}

/// Returns the lines for a shell that the book has below a heading.
fn commands(heading: &str) -> Vec<String> {
    let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/orthros.md");
    let book = std::fs::read_to_string(book).unwrap();
    let (_, chapter) = book.split_once(&format!("\n### {heading}\n")).unwrap();
    let (_, block) = chapter.split_once("```console\n").unwrap();
    let (block, _) = block.split_once("```").unwrap();
    block.lines().filter_map(|line| line.strip_prefix("# ")).map(str::to_owned).collect()
}

#[test]
fn the_books_five_commands_carry_redis_over_a_panic() {
    let programs = [
        ("redis-server", "redis-server"),
        ("redis-cli", "redis-tools"),
        ("mkfs.ext4", "e2fsprogs"),
        ("ip", "iproute2"),
    ];
    if let Some(why) = missing(&programs) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let [install, up, before, crash, after]: [String; 5] = commands("In five commands").try_into().unwrap();
    // What the first one installs is what this project says it needs.
    let packages =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/packages.txt"));
    let packages = packages.unwrap();
    for package in install.strip_prefix("apt-get install ").unwrap().split_whitespace() {
        assert!(packages.lines().any(|line| line.split_whitespace().next() == Some(package)), "{package}");
    }
    // The others, with a directory and a network that are nobody else's.
    let directory = tempfile::tempdir().unwrap();
    let programs = directory.path().join("programs");
    std::fs::create_dir(&programs).unwrap();
    std::os::unix::fs::symlink(ORRERY, programs.join("orrery")).unwrap();
    let (network, place) = (format!("orrery-book-{}", std::process::id()), directory.path().join("pair"));
    let shell = |line: &str| {
        let line = line.replace("/var/lib/pair", place.to_str().unwrap());
        let line = line.replace("--network service", &format!("--network {network}"));
        let line = line.replace("netns exec service", &format!("netns exec {network}"));
        let mut command = Command::new("sh");
        let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap_or_default());
        command.args(["-c", &line]).env("PATH", path).env("ORRERY_CACHE", cache()).stdin(Stdio::null());
        command
    };
    let said = |line: &str| {
        let output = shell(line).output().unwrap();
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let _one = ONE_PAIR.lock();
    let up = format!("exec {}", up.strip_suffix(" &").unwrap());
    let _pair = Running::up(shell(&up));
    // A service that runs may need a moment until it listens.
    let begin = Instant::now();
    while !shell(&before.replace("incr visitors", "ping")).output().unwrap().stdout.starts_with(b"PONG") {
        assert!(begin.elapsed() < PATIENCE, "redis does not answer");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(said(&before).trim(), "1");
    let story = said(&crash);
    assert!(story.contains("the service lives again") && story.contains("a new backup stands by"), "{story}");
    assert_eq!(said(&after).trim(), "2");
    said("orrery orthros down --directory /var/lib/pair");
    assert!(!ip(&["netns", "list"]).contains(&network), "the network is gone");
}

/// A request that the host sends as soon as the guest has reported its service reaches the guest.
#[test]
fn a_guest_hears_what_it_is_asked_at_once() {
    if let Some(why) = missing(&[]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let mut pair = Pair::start(PairConfig {
        directory: directory.path().to_owned(),
        cache: cache(),
        service: Service { argv: vec!["sleep".to_owned(), "1000".to_owned()], ..Service::default() },
        memory_mib: 256,
        cpus: 1,
        silence: PATIENCE,
        network: None,
        disk: None,
        append: String::new(),
    })
    .unwrap();
    for _ in 0..2 {
        pair.reboot().unwrap();
        assert_eq!(pair.run(&["echo", "at once"]).unwrap().trim(), "at once");
    }
}
