//! What friendly clients get.

use std::os::fd::AsFd;

use orrery_orc_client::{Error, Flags, ObjectId, Refusal};

use crate::{Store, bytes, eventually, refusal};

#[test]
fn objects_of_all_sizes_are_shared() {
    let store = Store::new(&[]);
    let (one, two) = (store.client(), store.client());
    for (seed, length) in [(1, 1), (2, 100), (3, 2048), (4, 2049), (5, 4096), (6, 40_000), (7, 5_000_001)] {
        let content = bytes(length, seed);
        let first = one.register(&content, Flags::none()).unwrap();
        assert_eq!(first.id(), ObjectId::of(&content));
        let second = two.request(first.id()).unwrap();
        let again = two.register(&content, Flags::none()).unwrap();
        for object in [&first, &second, &again] {
            assert_eq!(*object.map().unwrap(), *content);
            object.verify().unwrap();
            assert!(object.is_permanent() || length <= 2048);
            assert!(matches!(object.map_executable(), Err(Error::NotExecutable { .. })));
            let ours = rustix::fs::fstat(object.as_fd()).unwrap();
            let theirs = rustix::fs::fstat(first.as_fd()).unwrap();
            assert_eq!((ours.st_ino, object.offset()), (theirs.st_ino, first.offset()), "one copy");
        }
    }
    let report = one.report().unwrap();
    assert_eq!(report.objects.len(), 7);
    let small: Vec<_> = report.objects.iter().filter(|object| object.length <= 2048).collect();
    assert!(small.iter().all(|object| object.inode == small[0].inode), "small objects share pages");
    let alone = one.register(&bytes(10, 99), Flags::OWN_PAGES).unwrap();
    assert!(alone.offset() == 0 && alone.is_permanent());
}

#[test]
fn what_is_wrong_is_refused_and_changes_nothing() {
    let store = Store::new(&["--largest", "1M"]);
    let client = store.client();
    assert_eq!(refusal(client.request(ObjectId([1; 32]))), Refusal::NotFound);
    assert_eq!(refusal(client.register(&[], Flags::none())), Refusal::Size);
    assert_eq!(refusal(client.register(&bytes((1 << 20) + 1, 1), Flags::none())), Refusal::Size);
    let wrong = Some(ObjectId::of(b"other"));
    assert_eq!(refusal(client.register_expecting(b"bytes", Flags::none(), wrong)), Refusal::Mismatch);
    let large = bytes(100_000, 2);
    assert_eq!(refusal(client.register_expecting(&large, Flags::none(), wrong)), Refusal::Mismatch);
    assert_eq!(refusal(client.register(b"code", Flags::EXECUTABLE)), Refusal::Denied, "only from files");
    let directory = std::fs::File::open(store.path()).unwrap();
    assert_eq!(refusal(client.register_file(directory.as_fd(), 100, Flags::none())), Refusal::Descriptor);
    let memory = rustix::fs::memfd_create("short", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(refusal(client.register_file(memory.as_fd(), 100, Flags::none())), Refusal::Changed);
    assert!(client.report().unwrap().objects.is_empty());
}

#[test]
fn quotas_bound_what_is_held_and_idle_objects_make_room() {
    let store = Store::new(&["--quota", "1M", "--keep", "1000", "--objects", "50"]);
    let client = store.client();
    let content = |seed| bytes(400_000, seed);
    let (first, second) = (
        client.register(&content(1), Flags::none()).unwrap(),
        client.register(&content(2), Flags::none()).unwrap(),
    );
    assert_eq!(refusal(client.register(&content(3), Flags::none())), Refusal::Quota);
    assert_eq!(client.report().unwrap().objects.len(), 2, "nothing was evicted in vain");
    let (id, kept) = (first.id(), first.map().unwrap());
    drop(first);
    assert_eq!(client.request(id).unwrap().len(), 400_000, "it waits");
    client.register(&content(3), Flags::none()).unwrap();
    assert_eq!(refusal(client.request(id)), Refusal::NotFound);
    assert_eq!(*kept, *content(1), "a mapping outlives the object");
    drop(second);
    let small: Vec<_> =
        (0..50).map(|seed| client.register(&bytes(20, seed + 10), Flags::none()).unwrap()).collect();
    assert_eq!(refusal(client.register(&bytes(20, 5), Flags::none())), Refusal::Quota);
    drop(small);
    client.register(&bytes(20, 5), Flags::none()).unwrap();
}

#[test]
fn what_nobody_holds_goes() {
    let store = Store::new(&["--keep", "0"]);
    let client = store.client();
    let (held, dropped) = (
        client.register(b"held", Flags::none()).unwrap(),
        client.register(&bytes(9000, 1), Flags::none()).unwrap(),
    );
    let id = dropped.id();
    drop(dropped);
    eventually("eviction", || client.report().unwrap().objects.len() == 1);
    assert_eq!(refusal(client.request(id)), Refusal::NotFound);
    assert_eq!(client.request(held.id()).unwrap().len(), 4);
    // Of the small ones the memory goes with the last.
    drop(held);
    eventually("eviction", || client.report().unwrap().objects.is_empty());
    assert_eq!(*client.register(b"held", Flags::none()).unwrap().map().unwrap(), *b"held");
}

#[test]
fn objects_held_twice_stay_until_they_are_released_twice() {
    let store = Store::new(&["--keep", "0"]);
    let client = store.client();
    let one = client.register(b"twice", Flags::none()).unwrap();
    let two = client.request(one.id()).unwrap();
    drop(one);
    std::thread::sleep(std::time::Duration::from_millis(1500));
    assert_eq!(client.report().unwrap().objects.len(), 1);
    drop(two);
    eventually("eviction", || client.report().unwrap().objects.is_empty());
}

#[test]
fn many_threads_share_a_client() {
    let store = Store::new(&[]);
    let client = store.client();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let client = client.clone();
            scope.spawn(move || {
                for round in 0..50 {
                    let content = bytes(3000, round % 7);
                    let object = client.register(&content, Flags::none()).unwrap();
                    assert_eq!(*object.map().unwrap(), *content, "{thread}");
                }
            });
        }
    });
    assert_eq!(client.report().unwrap().objects.len(), 7);
}
