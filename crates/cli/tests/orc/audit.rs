//! The audit log: who asked for what, and what was said.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use orrery_orc_client::{Flags, ObjectId, Refusal};
use serde_json::Value;

use crate::unmodified::run;
use crate::{Store, bytes, eventually, refusal, signal};

fn lines(log: &Path) -> Vec<Value> {
    let text = fs::read_to_string(log).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn the_log_tells_who_did_what_and_what_was_said() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let store = Store::new(&["--log", log.to_str().unwrap(), "--largest", "3M", "--keep", "1"]);
    let client = store.client();
    let secret = b"bytes that are nobody else's business";
    let object = client.register(secret, Flags::none()).unwrap();
    let (id, unknown) = (object.id(), ObjectId::of(b"unknown"));
    client.request(id).unwrap();
    assert_eq!(refusal(client.request(unknown)), Refusal::NotFound);
    assert_eq!(refusal(client.register(&bytes(4 << 20, 1), Flags::none())), Refusal::Size);
    assert_eq!(refusal(client.register(b"code", Flags::EXECUTABLE)), Refusal::Denied);
    // A program whose file the policy refuses, with libraries that it does not.
    let program = directory.path().join("sleep");
    orrery_testing::copy_program("/bin/sleep", &program);
    fs::set_permissions(&program, fs::Permissions::from_mode(0o777)).unwrap();
    let mut child = run(&store, &[program.to_str().unwrap(), "0"]).spawn().unwrap();
    assert!(child.wait().unwrap().success());
    signal(store.server(), libc::SIGKILL);
    eventually("a new server", || store.client().request(id).is_ok());
    drop(object);
    drop(client);
    eventually("it is evicted", || lines(&log).iter().any(|line| line["event"] == "evict"));

    let lines = lines(&log);
    let own = std::process::id();
    let is_ours = |line: &&Value| line["pid"] == own;
    let ours: Vec<_> = lines.iter().filter(is_ours).collect();
    assert!(ours.iter().all(|line| line["uid"] == rustix::process::geteuid().as_raw()));
    let find = |event: &str, object: Option<ObjectId>| {
        let object = object.map(|id| id.to_string());
        let is_it = |line: &&&Value| line["event"] == event && line["object"].as_str() == object.as_deref();
        let found: Vec<_> = ours.iter().filter(is_it).map(|line| line["note"].as_str()).collect();
        assert!(!found.is_empty(), "{event} {object:?}: {lines:#?}");
        found.into_iter().map(|note| note.map(str::to_owned)).collect::<Vec<_>>()
    };
    assert_eq!(find("register", Some(id)), [None]);
    assert_eq!(find("request", Some(id))[0], None);
    assert_eq!(find("request", Some(unknown)), [Some(Refusal::NotFound.to_string())]);
    let refused = find("register", None);
    assert_eq!(refused, [Refusal::Size, Refusal::Denied].map(|refusal| Some(refusal.to_string())));
    assert!(find("connect", None).len() >= 2 && find("leave", None).iter().all(Option::is_none));
    let of_child: Vec<_> = lines.iter().filter(|line| line["pid"] == child.id()).collect();
    let files = of_child.iter().find(|line| line["event"] == "files").unwrap();
    assert!(files["note"].as_str().unwrap().contains("1 of "), "{files}");
    assert!(lines.iter().any(|line| line["event"] == "restart"));
    assert!(lines.is_sorted_by_key(|line| line["time"].as_u64().unwrap() / 1000), "in the order of time");
    // It is the store's alone, and has none of the bytes.
    assert_eq!(fs::metadata(&log).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(!fs::read(&log).unwrap().windows(secret.len()).any(|window| window == secret));
}
