//! SIGKILL for the store, its supervisor and its clients, at every step.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use orrery_orc_client::{Client, Flags, ObjectId};

use crate::{Store, bytes, children, connect, eventually, signal, start, zombie};

fn gone(pid: i32) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists() || zombie(pid)
}

/// Kills the process that answers and waits until another one does.
fn kill_server(store: &Store) {
    let before = store.server();
    signal(before, libc::SIGKILL);
    eventually("a new store", || store.server() != before);
}

#[test]
fn a_new_server_knows_everything_and_clients_notice_nothing() {
    let store = Store::new(&["--keep", "0"]);
    let client = store.client();
    let large = bytes(200_000, 1);
    let objects: Vec<_> = [&large[..], b"small", b"other"]
        .map(|content| client.register(content, Flags::none()).unwrap())
        .into();
    let mapping = objects[0].map().unwrap();
    for round in 0..5 {
        kill_server(&store);
        assert_eq!(*mapping, *large);
        // The connection is the old one, and so are the holds.
        let report = client.report().unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        let held = report.objects.iter().filter(|object| object.holders.contains_key(&own)).count();
        assert_eq!(held, 3, "round {round}: {report:?}");
        for object in &objects {
            assert_eq!(client.request(object.id()).unwrap().len(), object.len());
        }
        // Held for a moment only.
        client.register(&bytes(3000, 100 + round), Flags::none()).unwrap();
    }
    // What is released now is counted as it was before the deaths.
    drop(objects);
    eventually("eviction", || client.report().unwrap().objects.is_empty());
    assert_eq!(*mapping, *large);
}

#[test]
fn the_server_dies_in_the_midst_of_everything() {
    let store = Store::new(&[]);
    let path = store.path().to_owned();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..3_u64)
            .map(|worker| {
                let path = path.clone();
                scope.spawn(move || {
                    let client = connect(&path);
                    for round in 0..120 {
                        let content =
                            bytes(if round % 3 == 0 { 300_000 } else { 500 }, worker * 1000 + round % 20);
                        let object = client.register(&content, Flags::none()).unwrap();
                        assert_eq!(*object.map().unwrap(), *content);
                        let same = client.request(object.id()).unwrap();
                        assert_eq!(*same.map().unwrap(), *content);
                    }
                })
            })
            .collect();
        let mut deaths = 0;
        while workers.iter().any(|worker| !worker.is_finished()) && deaths < 8 {
            kill_server(&store);
            deaths += 1;
            // Four deaths in ten seconds are as many as the supervisor forgives.
            std::thread::sleep(std::time::Duration::from_millis(2_200));
        }
        for worker in workers {
            worker.join().unwrap();
        }
    });
}

#[test]
fn a_new_supervisor_knows_everything() {
    let mut store = Store::new(&["--keep", "1000"]);
    let client = store.client();
    let object = client.register(&bytes(100_000, 1), Flags::none()).unwrap();
    let small = client.register(b"small", Flags::none()).unwrap();
    let server = store.server();
    store.supervisor.kill().unwrap();
    store.supervisor.wait().unwrap();
    eventually("a new supervisor", || !children(server).is_empty());
    assert_eq!(store.server(), server, "nobody else had to start");
    let supervisor = children(server)[0];
    // And what comes now it keeps, too.
    let third = client.register(&bytes(50_000, 2), Flags::none()).unwrap();
    kill_server(&store);
    assert!(!gone(supervisor));
    for known in [&object, &small, &third] {
        assert_eq!(client.request(known.id()).unwrap().len(), known.len());
    }
    assert_eq!(*client.request(third.id()).unwrap().map().unwrap(), *bytes(50_000, 2));
    // The lock is still held: no second store takes the socket away.
    let second = start(store.path(), &[]).wait().unwrap();
    assert!(!second.success());
    // SIGTERM to the new supervisor ends both.
    let server = store.server();
    signal(supervisor, libc::SIGTERM);
    eventually("the end", || gone(supervisor) && gone(server));
}

#[test]
fn when_both_die_no_page_is_lost_and_a_new_store_is_filled_again() {
    let mut store = Store::new(&[]);
    let client = store.client();
    let content = bytes(100_000, 1);
    let object = client.register(&content, Flags::none()).unwrap();
    let mapping = object.map().unwrap();
    let server = store.server();
    // Stopped, it cannot start a supervisor in between.
    signal(server, libc::SIGSTOP);
    store.supervisor.kill().unwrap();
    store.supervisor.wait().unwrap();
    signal(server, libc::SIGKILL);
    eventually("the end", || gone(server));
    assert_eq!(*mapping, *content);
    // Its threads take a moment longer than the process.
    eventually("nobody listens", || Client::connect_to(store.path()).is_err());
    assert!(client.request(object.id()).is_err());
    object.verify().unwrap();
    store.supervisor = start(store.path(), &[]);
    let _ = store.client();
    // The old client finds the new store by itself, which knows nothing yet.
    assert_eq!(crate::refusal(client.request(object.id())), orrery_orc_client::Refusal::NotFound);
    let again = client.register(&content, Flags::none()).unwrap();
    assert_eq!(again.id(), object.id());
    // The old handle's hold went with the old store: letting go of it does not touch the new one.
    drop(object);
    assert_eq!(client.request(again.id()).unwrap().len(), content.len());
}

/// Not a test: what a client does that is about to be killed.
#[test]
fn as_a_client() {
    let Ok(path) = std::env::var("ORC_TEST_STORE") else { return };
    let client = Client::connect_to(Path::new(&path)).unwrap();
    let mut objects = Vec::new();
    for round in 0_u64.. {
        objects.push(client.register(&bytes(200_000, round % 10), Flags::none()).unwrap());
        if round == 12 {
            println!("\nholding");
        }
        objects.push(client.register(&bytes(50, round % 30), Flags::none()).unwrap());
        if objects.len() > 60 {
            objects.drain(..40);
        }
    }
}

#[test]
fn what_killed_clients_held_is_free_again() {
    let store = Store::new(&["--keep", "0"]);
    let client = store.client();
    let kept = client.register(&bytes(200_000, 3), Flags::none()).unwrap();
    for pause in [0, 1, 3, 7, 20] {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "deaths::as_a_client", "--nocapture"])
            .env("ORC_TEST_STORE", store.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "holding"));
        std::thread::sleep(std::time::Duration::from_millis(pause));
        child.kill().unwrap();
        child.wait().unwrap();
        eventually("all is free", || client.report().unwrap().objects.len() == 1);
    }
    assert_eq!(client.request(ObjectId::of(&bytes(200_000, 3))).unwrap().id(), kept.id());
}
