//! Clients that want what is not theirs, or the store's end.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use orrery_orc_client::protocol::{
    Content, FileRange, Handle, MAX_FDS, PlacementRequest, RelocatedData, Reply, Request, decode_reply,
};
use orrery_orc_client::{Client, Flags, ObjectId, Refusal};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

use crate::{Store, bytes, connect, eventually, refusal};

/// Returns a connection without any manners.
fn raw(store: &Store) -> OwnedFd {
    let _ = store.client();
    raw_at(&store.path().join("socket"))
}

pub(crate) fn raw_at(path: &std::path::Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

pub(crate) fn send(
    socket: &OwnedFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> rustix::io::Result<usize> {
    let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    let bytes = [std::io::IoSlice::new(bytes)];
    rustix::net::sendmsg(socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL)
}

/// The answer, or nothing where the connection was closed.
fn receive(socket: &OwnedFd) -> Option<(u64, Reply)> {
    let mut buffer = vec![0; 65_536];
    let (length, _) = rustix::net::recv(socket, &mut buffer[..], RecvFlags::empty()).ok()?;
    decode_reply(&buffer[..length])
}

#[test]
fn noise_is_answered_politely() {
    let store = Store::new(&[]);
    let socket = raw(&store);
    for length in [1, 8, 15, 16, 17, 100, 4000] {
        send(&socket, &bytes(length, length as u64), &[]).unwrap();
        assert_eq!(receive(&socket), Some((0, Reply::Refused(Refusal::Malformed))));
    }
    // Cut off anywhere, or longer than it says.
    let good = Request::Files(vec![FileRange { flags: 0, offset: 0, length: 4096 }; 3]).encode(77);
    for length in 1..good.len() {
        send(&socket, &good[..length], &[]).unwrap();
        assert!(matches!(receive(&socket), Some((0 | 77, Reply::Refused(_)))), "{length}");
    }
    // More than the store reads: what it reads makes no sense, or less than the whole.
    send(&socket, &bytes(60_000, 3), &[]).unwrap();
    assert!(matches!(receive(&socket), Some((_, Reply::Refused(_)))));
    // An empty packet says goodbye.
    send(&socket, &[], &[]).unwrap();
    assert_eq!(receive(&socket), None);
    assert!(store.client().report().unwrap().objects.is_empty());
}

#[test]
fn unwanted_descriptors_are_closed() {
    let store = Store::new(&[]);
    let server = store.server();
    let count = || std::fs::read_dir(format!("/proc/{server}/fd")).unwrap().count();
    let socket = raw(&store);
    send(&socket, &Request::Report.encode(1), &[]).unwrap();
    receive(&socket).unwrap();
    let before = count();
    let file = std::fs::File::open("/dev/null").unwrap();
    for request in [Request::Report.encode(2), Request::Request(ObjectId([1; 32])).encode(2), vec![0; 40]] {
        for many in [1, MAX_FDS, 250] {
            send(&socket, &request, &vec![file.as_fd(); many]).unwrap();
            assert!(receive(&socket).is_some());
        }
    }
    // They are closed when the answer is under way.
    let too_many = || count() > before;
    for _ in 0..100 {
        if too_many() {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
    assert!(!too_many(), "{} descriptors, {before} before", count());
}

#[test]
fn handles_cannot_be_forged_or_replayed() {
    let store = Store::new(&["--keep", "0"]);
    let client = store.client();
    let object = client.register(&bytes(9000, 1), Flags::none()).unwrap();
    let socket = raw(&store);
    // A release by somebody who holds nothing.
    send(&socket, &Request::Release(object.id()).encode(1), &[]).unwrap();
    assert_eq!(receive(&socket), Some((1, Reply::Refused(Refusal::NotHeld))));
    // A handle is an answer: as a request it is nothing.
    let forged = Handle { id: object.id(), offset: 0, length: 1 << 40, flags: 1 };
    send(&socket, &Reply::Handle(forged).encode(2), &[]).unwrap();
    assert_eq!(receive(&socket), Some((2, Reply::Refused(Refusal::Malformed))));
    // A release that is sent twice counts once.
    send(&socket, &Request::Request(object.id()).encode(3), &[]).unwrap();
    assert!(matches!(receive(&socket), Some((3, Reply::Handle(_)))));
    for (tag, wanted) in [(4, Reply::Released), (5, Reply::Refused(Refusal::NotHeld))] {
        send(&socket, &Request::Release(object.id()).encode(tag), &[]).unwrap();
        assert_eq!(receive(&socket), Some((tag, wanted)));
    }
    assert_eq!(client.request(object.id()).unwrap().len(), 9000);
    // The descriptor cannot be used to change anything.
    let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&object.as_fd()));
    if let Ok(writable) = rustix::fs::open(&again, rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()) {
        assert_eq!(rustix::io::pwrite(&writable, b"x", 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&writable, 0), Err(Errno::PERM));
    }
    object.verify().unwrap();
}

#[test]
fn bytes_that_change_while_they_are_registered_cannot_lie() {
    let store = Store::new(&[]);
    let client = store.client();
    let memory = rustix::fs::memfd_create("moving", MemfdFlags::CLOEXEC).unwrap();
    let length = 2 << 20;
    rustix::fs::ftruncate(&memory, length).unwrap();
    let done = AtomicBool::new(false);
    let (mut good, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0_u64.. {
                if done.load(Ordering::Relaxed) {
                    return;
                }
                let _ = rustix::io::pwrite(&memory, &bytes(4096, round), (round * 7919 * 4096) % length);
                if round % 50 == 0 {
                    let _ = rustix::fs::ftruncate(&memory, length / 2);
                    let _ = rustix::fs::ftruncate(&memory, length);
                }
            }
        });
        for _ in 0..40 {
            match client.register_file(memory.as_fd(), length, Flags::none()) {
                // Whatever the bytes were: they are what the name says, and stay so.
                Ok(object) => {
                    object.verify().unwrap();
                    good += 1;
                }
                Err(orrery_orc_client::Error::Refused { refusal: Refusal::Changed, .. }) => refused += 1,
                Err(other) => panic!("{other}"),
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(good + refused, 40);
}

#[test]
fn who_does_not_read_is_cut_off() {
    let store = Store::new(&[]);
    let client = store.client();
    let object = client.register(&bytes(9000, 1), Flags::none()).unwrap();
    let socket = raw(&store);
    let request = Request::Request(object.id()).encode(1);
    let mut sent = 0;
    while send(&socket, &request, &[]).is_ok() {
        sent += 1;
        assert!(sent < 1_000_000, "it goes on for ever");
    }
    eventually("its holds are gone", || client.report().unwrap().connections <= 2);
    assert_eq!(client.request(object.id()).unwrap().len(), 9000, "others are served");
}

#[test]
fn connections_are_counted() {
    let store = Store::new(&["--connections", "20"]);
    let client = store.client();
    let mut others: Vec<OwnedFd> = Vec::new();
    for _ in 0..200 {
        others.push(raw_or_none(&store));
    }
    assert!(client.report().unwrap().connections <= 20);
    assert_eq!(client.register(b"still served", Flags::none()).unwrap().len(), 12);
    drop(others);
    eventually("room again", || Client::connect_to(store.path()).and_then(|client| client.report()).is_ok());
}

fn raw_or_none(store: &Store) -> OwnedFd {
    raw_to(&store.path().join("socket"))
}

/// A socket that is connected if that is possible.
fn raw_to(path: &std::path::Path) -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let _ = rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap());
    socket
}

#[test]
fn descriptors_that_one_uses_up_are_left_for_others() {
    let directory = tempfile::tempdir().unwrap();
    let socket = |name: &str| directory.path().join(name);
    let option = |name: &str| format!("{name}={}", socket(name).display());
    let named_domains = ["greedy", "modest"].map(option);
    let options =
        ["--keep", "100000", "--trust-domain", &named_domains[0], "--trust-domain", &named_domains[1]];
    let store = Store::with_descriptors(1000, &options);
    let server = store.server();
    let (greedy, modest) = (connect(&socket("greedy")), connect(&socket("modest")));
    let mut held = Vec::new();
    let refused = (0..1000).find_map(|seed| match greedy.register(&bytes(20, seed), Flags::OWN_PAGES) {
        Ok(object) => {
            held.push(object);
            None
        }
        other => Some(refusal(other)),
    });
    assert_eq!(refused, Some(Refusal::Quota), "there is an end to it");
    assert!(held.len() >= 200, "{}", held.len());
    // Connections take descriptors, too.
    let more: Vec<OwnedFd> = (0..600).map(|_| raw_to(&socket("greedy"))).collect();
    // Others find room, the greedy one is served, and nobody had to die for it.
    let objects: Vec<_> =
        (0..50).map(|seed| modest.register(&bytes(20, seed), Flags::OWN_PAGES).unwrap()).collect();
    assert!(Client::connect_to(&socket("modest")).unwrap().request(objects[7].id()).is_ok());
    assert_eq!(greedy.request(held[0].id()).unwrap().len(), 20);
    assert_eq!(store.server(), server);
    // Nor is anything lost when somebody dies.
    crate::signal(server, libc::SIGKILL);
    eventually("a new store", || store.server() != server);
    assert_eq!(greedy.request(held[held.len() - 1].id()).unwrap().len(), 20);
    assert_eq!(modest.request(objects[49].id()).unwrap().len(), 20);
    // What is let go of makes room at once, although it would be kept for a day.
    drop(more);
    held.truncate(held.len() - 60);
    eventually("room again", || greedy.register(&bytes(20, 5000), Flags::OWN_PAGES).is_ok());
}

#[test]
fn races_over_the_last_bytes_of_a_quota_end_well() {
    let store = Store::new(&["--keep", "0", "--quota", "40K", "--objects", "8"]);
    std::thread::scope(|scope| {
        for thread in 0..6_u64 {
            let client = store.client();
            scope.spawn(move || {
                for round in 0..150 {
                    // Five contents, of one to five pages, for six threads.
                    let seed = (thread + round) % 5;
                    let content = bytes(4096 * (1 + usize::try_from(seed).unwrap()), seed);
                    match client.register(&content, Flags::none()) {
                        Ok(object) => {
                            let again = client.request(object.id()).unwrap();
                            assert!(*again.map().unwrap() == *content && *object.map().unwrap() == *content);
                        }
                        other => assert_eq!(refusal(other), Refusal::Quota),
                    }
                }
            });
        }
    });
    let client = store.client();
    eventually("nothing is left", || client.report().unwrap().objects.is_empty());
    assert_eq!(client.register(&bytes(40_000, 9), Flags::none()).unwrap().len(), 40_000, "nor counted");
}

#[test]
fn trust_domains_learn_nothing_of_one_another() {
    let directory = tempfile::tempdir().unwrap();
    let socket = |name: &str| directory.path().join(name);
    let option = |name: &str| format!("{name}={}", socket(name).display());
    let store =
        Store::new(&["--trust-domain", &option("a"), "--trust-domain", &option("b"), "--quota", "1M"]);
    let (a, b, common) = (connect(&socket("a")), connect(&socket("b")), store.client());
    let secret = bytes(100_000, 1);
    let object = a.register(&secret, Flags::none()).unwrap();
    // Asking, registering and reporting give b exactly what it would get without a.
    let nowhere = ObjectId::of(b"nobody has this");
    let answer = |client: &Client, id: ObjectId| refusal(client.request(id));
    assert_eq!(answer(&b, object.id()), answer(&b, nowhere));
    assert_eq!(answer(&common, object.id()), Refusal::NotFound);
    assert!(b.report().unwrap().objects.is_empty());
    assert_eq!(b.report().unwrap().connections, 1);
    let own = b.register(&secret, Flags::none()).unwrap();
    let inode = |object: &orrery_orc_client::Object| rustix::fs::fstat(object.as_fd()).unwrap().st_ino;
    assert_ne!(inode(&own), inode(&object), "equal bytes of strangers lie in memory twice");
    // What a uses up is a's.
    assert_eq!(refusal(a.register(&bytes(1 << 20, 2), Flags::none())), Refusal::Quota);
    b.register(&bytes(900_000, 2), Flags::none()).unwrap();
    // Who comes through a trust domain's socket is no administrator, even as root.
    assert_eq!(refusal(a.register(b"for all", Flags::PUBLIC)), Refusal::Denied);
    let public = common.register(b"for all", Flags::PUBLIC).unwrap();
    assert!(public.is_public());
    for client in [&a, &b] {
        let found = client.request(public.id()).unwrap();
        assert!(found.is_public() && *found.map().unwrap() == *b"for all");
    }
    // The administrator sees all.
    assert_eq!(common.report().unwrap().objects.len(), 4);
}

#[test]
fn users_are_told_apart_by_the_kernel() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can become another user");
        return;
    }
    let store = Store::new(&[]);
    let root = store.client();
    let object = root.register(&bytes(5000, 1), Flags::none()).unwrap();
    let directory = store.path().to_owned();
    let id = object.id();
    std::thread::spawn(move || {
        // SAFETY: the bare system call changes this thread alone, which ends soon.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) }, 0);
        let nobody = Client::connect_to(&directory).unwrap();
        assert_eq!(refusal(nobody.request(id)), Refusal::NotFound);
        assert_eq!(refusal(nobody.register(b"x", Flags::PUBLIC)), Refusal::Denied);
        assert!(nobody.report().unwrap().objects.is_empty());
        let own = nobody.register(b"own", Flags::none()).unwrap();
        assert_eq!(nobody.report().unwrap().objects.len(), 1);
        own.verify().unwrap();
    })
    .join()
    .unwrap();
}

/// Returns a socket that is bound where the socket of a store in `directory` would be.
fn bound_socket(directory: &std::path::Path) -> OwnedFd {
    let path = directory.join("socket");
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    socket
}

#[test]
fn a_store_of_somebody_else_is_not_believed() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can become another user");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = bound_socket(directory.path());
    std::thread::spawn(move || {
        // SAFETY: the bare system call changes this thread alone, which ends soon.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) }, 0);
        rustix::net::listen(&socket, 10).unwrap();
        std::mem::forget(socket);
    })
    .join()
    .unwrap();
    let error = Client::connect_to(directory.path()).unwrap_err();
    assert!(matches!(error, orrery_orc_client::Error::Owner { uid: 65_534, .. }), "{error}");
}

#[test]
fn a_lying_store_is_found_out() {
    let directory = tempfile::tempdir().unwrap();
    let socket = bound_socket(directory.path());
    rustix::net::listen(&socket, 10).unwrap();
    let id = ObjectId::of(b"wanted");
    // What the liar answers: an unsealed file; one that is too short; an end beyond all numbers; no descriptor.
    let lies = std::thread::spawn(move || {
        let peer = rustix::net::accept(&socket).unwrap();
        let memory =
            rustix::fs::memfd_create("lie", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memory, 4096).unwrap();
        let sealed = || {
            let all =
                rustix::fs::SealFlags::WRITE | rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
            rustix::fs::fcntl_add_seals(&memory, all).unwrap();
        };
        for (number, (offset, length)) in
            [(0, 6), (0, 9000), (u64::MAX, 6), (0, 6), (0, 0)].into_iter().enumerate()
        {
            let mut buffer = vec![0; 65_536];
            let tag = loop {
                let (got, _) = rustix::net::recv(&peer, &mut buffer[..], RecvFlags::empty()).unwrap();
                match orrery_orc_client::protocol::decode_request(&buffer[..got]).unwrap() {
                    // What was refused is released.
                    (tag, Request::Release(_)) => {
                        send(&peer, &Reply::Released.encode(tag), &[]).unwrap();
                    }
                    (tag, _) => break tag,
                }
            };
            if number == 1 {
                sealed();
            }
            let reply = Reply::Handle(Handle { id, offset, length, flags: 0 }).encode(tag);
            let with = [memory.as_fd()];
            send(&peer, &reply, if number == 3 { &[] } else { &with }).unwrap();
        }
    });
    let client = Client::connect_to(directory.path()).unwrap();
    for wanted in ["not sealed", "not sealed", "not sealed", "the reply is malformed", "not sealed"] {
        // With its causes.
        let error = format!("{:#}", anyhow::Error::from(client.request(id).unwrap_err()));
        assert!(error.contains(wanted), "{error}");
    }
    lies.join().unwrap();
}

#[test]
fn inline_content_that_pretends_is_nothing() {
    let store = Store::new(&[]);
    let socket = raw(&store);
    // A descriptor is promised and does not come; two come where one is due.
    let content = Content::Descriptor { length: 4096 };
    let request = Request::Register { flags: 0, expected: None, content }.encode(1);
    send(&socket, &request, &[]).unwrap();
    assert_eq!(receive(&socket), Some((1, Reply::Refused(Refusal::Descriptor))));
    let memory = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).unwrap();
    send(&socket, &request, &[memory.as_fd(), memory.as_fd()]).unwrap();
    assert_eq!(receive(&socket), Some((1, Reply::Refused(Refusal::Descriptor))));
    let content = Content::Descriptor { length: u64::MAX };
    send(&socket, &Request::Register { flags: 0, expected: None, content }.encode(2), &[memory.as_fd()])
        .unwrap();
    assert_eq!(receive(&socket), Some((2, Reply::Refused(Refusal::Size))));
}

#[test]
fn the_book_and_what_is_remembered_lie_within_a_trust_domain() {
    let named = tempfile::tempdir().unwrap();
    let socket = named.path().join("socket");
    let store = Store::new(&["--trust-domain", &format!("other={}", socket.display())]);
    let _ = connect(&socket);
    let (own, other) = (raw(&store), raw_at(&socket));
    let name = RelocatedData { key: 7, address: 1 << 40, start: 4096, length: 8192 };
    let memory = rustix::fs::memfd_create("relocated", MemfdFlags::CLOEXEC).unwrap();
    rustix::io::pwrite(&memory, &bytes(8192, 5), 0).unwrap();
    let refused = |socket: &OwnedFd, request: &Request<'_>, descriptors: &[BorrowedFd<'_>]| {
        send(socket, &request.encode(1), descriptors).unwrap();
        match receive(socket) {
            Some((1, Reply::Refused(refusal))) => refusal,
            other => panic!("{other:?}"),
        }
    };
    // Nothing comes of too little, too much, half pages, files of another kind.
    let remember = Request::RegisterRelocated(name);
    assert_eq!(refused(&own, &remember, &[]), Refusal::Descriptor);
    let longer = Request::RegisterRelocated(RelocatedData { length: 1 << 20, ..name });
    assert_eq!(refused(&own, &longer, &[memory.as_fd()]), Refusal::Changed);
    let half = Request::RegisterRelocated(RelocatedData { length: 100, ..name });
    assert_eq!(refused(&own, &half, &[memory.as_fd()]), Refusal::Malformed);
    let huge = Request::RegisterRelocated(RelocatedData { length: 1 << 50, ..name });
    assert_eq!(refused(&own, &huge, &[memory.as_fd()]), Refusal::Size);
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    assert_eq!(refused(&own, &remember, &[file.as_fd()]), Refusal::Descriptor);
    send(&own, &remember.encode(2), &[memory.as_fd()]).unwrap();
    assert!(matches!(receive(&own), Some((2, Reply::Handle(Handle { length: 8192, .. })))));
    let recall = |socket: &OwnedFd| {
        send(socket, &Request::FindRelocated(vec![name, RelocatedData { key: 8, ..name }]).encode(3), &[])
            .unwrap();
        match receive(socket) {
            Some((3, Reply::FileRanges(answers))) => {
                answers.iter().map(|answer| answer.refusal).collect::<Vec<_>>()
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(recall(&own), [None, Some(Refusal::NotFound)]);
    assert_eq!(recall(&other), [Some(Refusal::NotFound); 2], "another trust domain's");
    // Each has a book of its own, which only the store can write.
    let book = |socket: &OwnedFd| {
        let room = PlacementRequest { key: 9, length: 1 << 20, alignment: 4096 };
        send(socket, &Request::PlacementTable(room).encode(4), &[]).unwrap();
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = rustix::net::RecvAncillaryBuffer::new(&mut space);
        let mut buffer = [0; 100];
        let mut bytes = [std::io::IoSliceMut::new(&mut buffer)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = rustix::net::recvmsg(socket, &mut bytes, &mut ancillary, flags).unwrap().bytes;
        assert!(matches!(decode_reply(&buffer[..got]), Some((4, Reply::PlacementTable { .. }))));
        let rights = ancillary.drain().find_map(|message| match message {
            rustix::net::RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        rights.unwrap()
    };
    let (mine, theirs) = (book(&own), book(&other));
    assert_eq!(rustix::io::pwrite(&mine, &[0; 8], 0), Err(Errno::PERM));
    assert_eq!(rustix::fs::ftruncate(&mine, 0), Err(Errno::PERM));
    let start = |fd: &OwnedFd| {
        let mut word = [0; 8];
        rustix::io::pread(fd, &mut word, 0).unwrap();
        u64::from_le_bytes(word)
    };
    // One in 67 million.
    assert_ne!(start(&mine), start(&theirs), "who knows one does not know the other");
    for bad in [vec![0; 16], vec![1; 31], vec![1; 33], vec![1; 65 * 32]] {
        for kind in [6_u32, 7, 8] {
            let message = [b"ORC1".as_slice(), &kind.to_le_bytes(), &5_u64.to_le_bytes(), &bad].concat();
            send(&own, &message, &[]).unwrap();
            let answer = receive(&own);
            assert!(matches!(answer, Some((5, Reply::Refused(_)))), "{kind} {}: {answer:?}", bad.len());
        }
    }
}
