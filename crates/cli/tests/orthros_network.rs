//! What a service makes of its machine's network, with real kernels that really die. SKIPPED where QEMU, criu, nft, a kernel or
//! root are absent.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "orthros/pairs.rs"]
mod pairs;

use std::io::ErrorKind;
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use pairs::{Client, ONE_PAIR, Up, connect_to, missing};

/// An address of both sorts, a route, a neighbour and rules; then it counts for one client.
const SCRIPT: &str = "ip address add 10.77.0.77/24 dev eth0
ip -6 address add fd77::77/64 dev eth0
ip route add 10.88.0.0/16 via 10.77.0.1
ip route add 10.89.0.0/16 dev eth0
arp -s 10.77.0.99 02:00:00:00:00:99
nft -f /etc/rules
exec orrery-orthros-load ballast 1 0 0";

/// Whoever is connected stays so, and nobody gets in by the service's first address.
const RULES: &str = "table inet filter {
    set strangers {
        type ipv4_addr
        elements = { 10.99.0.1, 10.99.0.2 }
    }
    chain input {
        type filter hook input priority 0; policy accept;
        ct state established accept
        ip saddr @strangers drop
        ip daddr 10.77.0.2 tcp dport 7 counter reject with icmp type admin-prohibited
    }
}
";

/// Returns why nobody gets in by the service's first address.
fn refusal(network: &str) -> ErrorKind {
    let space = std::fs::File::open(Path::new("/run/netns").join(network)).unwrap();
    let tried = std::thread::spawn(move || {
        let kind = rustix::thread::LinkNameSpaceType::Network;
        rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&space), Some(kind)).unwrap();
        TcpStream::connect_timeout(&"10.77.0.2:7".parse().unwrap(), Duration::from_secs(60))
    });
    tried.join().unwrap().unwrap_err().kind()
}

/// Rules as they are listed, but for what is counted.
fn rules(up: &mut Up) -> String {
    up.say("run nft --stateless list ruleset");
    up.expect("ran")["text"].as_str().unwrap().to_owned()
}

/// A service gives itself addresses, routes and rules, and its clients come by them. They are there after its kernel's death, and so is
/// what came later, and not what it took back.
#[test]
fn addresses_routes_neighbours_and_rules_that_a_service_makes_survive() {
    if let Some(why) = missing(&[("nft", "nftables"), ("ip", "iproute2")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("rules");
    std::fs::write(&file, RULES).unwrap();
    let file = format!("{}:/etc/rules", file.display());
    let network = format!("orrery-own-{}", std::process::id());
    let mut options = vec!["--network", &network, "--program", "nft", "--file", &file, "--silence", "60"];
    options.extend(["--program", "orrery-orthros-load"]);
    let mut up = Up::start(&options, &["busybox", "sh", "-c", SCRIPT]);
    up.expect("help");
    let mut client = Client::of(connect_to(&network, "10.77.0.77", 7));
    assert_eq!(client.ask(""), "1");
    let before = rules(&mut up);
    assert!(before.contains("10.99.0.1, 10.99.0.2") && before.contains("ct state established"), "{before}");
    assert_eq!(refusal(&network), ErrorKind::HostUnreachable);
    let shows = |up: &mut Up, command: &str, there: &[&str], gone: &[&str]| {
        up.say(&format!("run {command}"));
        let text = up.expect("ran")["text"].as_str().unwrap().to_owned();
        assert!(there.iter().all(|word| text.contains(word)), "{command}: {text}");
        assert!(!gone.iter().any(|word| text.contains(word)), "{command}: {text}");
    };
    // Who is connected through a translated address could not be carried over.
    up.say("run nft add chain inet filter out { type nat hook postrouting priority 0 ; }");
    assert!(up.expect_failure().contains("No such file or directory"));
    // What the next kernel knows, and what the one after that does.
    for (count, address, gone) in [("2", "10.77.0.77/24", "10.77.0.78"), ("3", "10.77.0.78/24", "10.89.0.0")]
    {
        up.say("crash panic");
        let survived = up.expect("survived");
        assert_eq!(survived["failover"]["summary"]["remarks"].as_array().unwrap().len(), 0, "{survived}");
        assert_eq!(client.ask(""), count);
        assert_eq!(rules(&mut up), before);
        assert_eq!(refusal(&network), ErrorKind::HostUnreachable);
        let addresses = ["10.77.0.2/24", "10.77.0.77/24", "fd77::77/64", address];
        shows(&mut up, "ip address show dev eth0", &addresses, &[gone]);
        shows(&mut up, "ip route", &["10.88.0.0/16 via 10.77.0.1", "10.77.0.0/24"], &["default", gone]);
        shows(&mut up, "ip neigh", &["10.77.0.99 dev eth0 lladdr 02:00:00:00:00:99", "PERMANENT"], &[]);
        up.expect("renewed");
        if count == "2" {
            for command in ["ip address add 10.77.0.78/24 dev eth0", "ip route delete 10.89.0.0/16"] {
                up.say(&format!("run {command}"));
                up.expect("ran");
            }
            // It is kept in a moment.
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    up.say("quit");
    up.expect("end");
}

/// Rules can be made by any program, and are listed by one only.
#[test]
fn rules_that_nobody_can_list_are_told() {
    // In this guest it is not where anyone would look for it.
    const SCRIPT: &str =
        "mkdir /opt; mv $(which nft) /opt/other; /opt/other add table inet mine; exec sleep 1000";
    if let Some(why) = missing(&[("nft", "nftables")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let mut up = Up::start(&["--program", "nft", "--silence", "60"], &["busybox", "sh", "-c", SCRIPT]);
    up.expect("help");
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        up.say("run busybox find /opt -name other -exec {} list ruleset ;");
        if up.expect("ran")["text"].as_str().unwrap().contains("mine") {
            break;
        }
        assert!(Instant::now() < deadline, "it makes no rules");
        std::thread::sleep(Duration::from_millis(100));
    }
    // They are kept, or not, in a moment.
    std::thread::sleep(Duration::from_secs(1));
    up.say("crash panic");
    let survived = up.expect("survived");
    let remarks = survived["failover"]["summary"]["remarks"].to_string();
    assert!(remarks.contains("netfilter rules are lost") && remarks.contains("--program nft"), "{remarks}");
    up.expect("renewed");
    up.say("quit");
    up.expect("end");
}

/// A service takes an address back by which somebody is connected. That connection is carried over like any other, and speaks again
/// when the address is there again.
#[test]
fn an_address_that_was_taken_back_costs_nothing() {
    if let Some(why) = missing(&[("ip", "iproute2")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let network = format!("orrery-back-{}", std::process::id());
    let script = "ip address add 10.77.0.77/24 dev eth0; exec orrery-orthros-load ballast 1 0 0";
    let mut up = Up::start(
        &["--network", &network, "--program", "orrery-orthros-load", "--silence", "60"],
        &["busybox", "sh", "-c", script],
    );
    up.expect("help");
    let mut client = Client::of(connect_to(&network, "10.77.0.77", 7));
    assert_eq!(client.ask(""), "1");
    up.say("run ip address del 10.77.0.77/24 dev eth0");
    up.expect("ran");
    // The change is kept a moment later.
    up.say("run sleep 1");
    up.expect("ran");
    up.say("crash panic");
    up.expect("survived");
    up.say("run ip address show");
    let addresses = up.expect("ran")["text"].as_str().unwrap().to_owned();
    assert!(addresses.contains("10.77.0.2/24") && !addresses.contains("10.77.0.77"), "{addresses}");
    up.say("run ip address add 10.77.0.77/24 dev eth0");
    up.expect("ran");
    assert_eq!(client.ask(""), "2");
    up.expect("renewed");
    up.say("quit");
    up.expect("end");
}
