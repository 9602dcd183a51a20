//! Services whose memory comes when they live again already, and clients that nobody had accepted.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "orthros/pairs.rs"]
mod pairs;

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use pairs::{ONE_PAIR, Up, connect, missing};

/// How long a client waits for an answer, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

fn ask(client: &mut BufReader<TcpStream>, line: &str) -> String {
    writeln!(client.get_mut(), "{line}").unwrap();
    let mut answer = String::new();
    client.read_line(&mut answer).unwrap();
    answer.trim().to_owned()
}

#[test]
fn memory_comes_while_the_service_lives_and_who_was_not_accepted_hears_of_it() {
    if let Some(why) = missing(&[("ip", "iproute2")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let network = format!("orrery-memory-{}", std::process::id());
    // More than half of the machine's memory: there is no room for it twice.
    let service = ["orrery-orthros-load", "ballast", "300", "0", "2"];
    let mut up = Up::start(&["--network", &network, "--memory", "512", "--silence", "60"], &service);
    up.expect("help");
    // The service accepts one client at a time.
    let [client, mut waiting] = [(); 2].map(|()| connect(&network, 7));
    for stream in [&client, &waiting] {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    let mut client = BufReader::new(client);
    assert_eq!(ask(&mut client, ""), "1");
    for (death, count) in [("panic", "2"), ("nmi", "3")] {
        up.say(&format!("crash {death}"));
        let survived = up.expect("survived");
        let summary = &survived["failover"]["summary"];
        assert!(summary["lazy_pages"].as_u64().unwrap() >= 300 << 8, "{summary}");
        // At once, out of a few pages; and then all of it.
        assert_eq!(ask(&mut client, ""), count);
        let whole = up.expect("whole");
        assert!(whole["text"].as_str().unwrap().contains("MiB"), "{whole}");
        assert_eq!(ask(&mut client, "all"), "76800 of 76800 pages are right");
        if death == "panic" {
            assert!(summary["remarks"].to_string().contains("1 of them are reset"), "{summary}");
            assert_eq!(waiting.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
        }
        up.expect("renewed");
    }
    up.say("quit");
    up.expect("end");
}
