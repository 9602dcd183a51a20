//! The walkers on a machine made by hand: whole, with single structures broken, and with anything broken.

use object::read::elf::{FileHeader as _, ProgramHeader as _};
use object::{Endianness, Object as _, ObjectSegment as _};
use proptest::prelude::*;

use crate::packet::packets;
use crate::synthetic::{CODE, DATA, DIRECT, HUGE, Machine, Maker, SIZE, sockets::READ, walk_all};
use crate::{ControlGroup, Entry, FileKind, IdKind, Layout, Leaf, Object, PageOwner, State};

#[test]
fn processes_are_found_with_their_names_numbers_and_owners() {
    let machine = Machine::new();
    let kernel = machine.kernel();
    let walk = kernel.processes();
    assert!(walk.problems.is_empty(), "{:?}", walk.problems);
    let names: Vec<String> = walk.found.iter().map(|task| task.name().unwrap()).collect();
    assert_eq!(names, ["init", "worker"]);
    let worker = kernel.process(7).unwrap();
    assert_eq!(worker.parent().unwrap(), 1);
    assert_eq!(worker.ids(IdKind::Thread).unwrap(), [7, 107]);
    assert_eq!(worker.ids(IdKind::Session).unwrap(), [7, 107]);
    assert_eq!(worker.credentials().unwrap().uid, 1007);
    assert_eq!(worker.state().unwrap(), State::Sleeping);
    assert_eq!(worker.threads().found.len(), 1);
    let children = kernel.process(1).unwrap().children().found;
    assert_eq!(children.iter().map(|task| task.pid().unwrap()).collect::<Vec<_>>(), [7]);
    assert!(kernel.process(8).is_err());
}

#[test]
fn control_groups_are_found_in_all_hierarchies() {
    let machine = Machine::new();
    let kernel = machine.kernel();
    let walk = kernel.process(7).unwrap().control_groups();
    assert!(walk.problems.is_empty(), "{:?}", walk.problems);
    let group = |hierarchy, controllers, name: &str, path: &[u8]| ControlGroup {
        hierarchy,
        controllers,
        name: name.to_owned(),
        path: path.to_vec(),
    };
    assert_eq!(walk.found, [group(0, 0, "", b"/outer/inner"), group(7, 5, "batch", b"/")]);
    let walk = kernel.process(1).unwrap().control_groups();
    assert_eq!((walk.found.len(), walk.problems.len()), (0, 1), "one without any is reported");
}

#[test]
fn files_are_found_with_paths_across_mounts() {
    let machine = Machine::new();
    let kernel = machine.kernel();
    let worker = kernel.process(7).unwrap();
    let walk = worker.descriptors();
    assert!(walk.problems.is_empty(), "{:?}", walk.problems);
    assert_eq!(walk.found.iter().map(|found| found.number).collect::<Vec<_>>(), [3, 5]);
    assert_eq!(walk.found.iter().map(|found| found.closes_on_exec).collect::<Vec<_>>(), [false, true]);
    let file = walk.found[0].file;
    assert_eq!(file.path().unwrap().display(), "/data/file");
    assert_eq!((file.kind().unwrap(), file.position().unwrap()), (FileKind::Regular, 4711));
    let (working, root) = worker.directories().unwrap();
    assert_eq!((working.display().as_str(), root.display().as_str()), ("/data", "/"));
}

#[test]
fn whose_a_page_is_and_whether_it_is_shared_is_found() {
    let mut maker = Maker::new();
    let array = DIRECT + maker.room(1024 * 64, 4096);
    let base = DIRECT + maker.room(8, 8);
    maker.write_u64(base, array);
    maker.symbols.push(("vmemmap_base", base));
    let place = |number: u64| array + number * 64;
    let mut page = |number: u64, mapping: u64, times: u64| {
        maker.set(place(number), "page", "mapping", mapping);
        maker.set(place(number), "page", "_mapcount.counter", times.wrapping_sub(1));
    };
    let (anonymous, file) = (DIRECT + 0x5001, DIRECT + 0x5000);
    page(3, anonymous, 1);
    page(4, anonymous, 2);
    page(5, file, 1);
    page(6, 0, 1);
    // Two large ones, the first mapped as one by one process, the second by two; their later pages lead to the first.
    for first in [512, 768] {
        page(first, anonymous, 0);
        page(first + 1, 0, 0);
    }
    for (first, times) in [(512, 1_u64), (768, 2)] {
        maker.set(place(first), "page", "flags", 1 << 16);
        maker.set(place(first + 1), "page", "compound_head", place(first) + 1);
        maker.set(place(first + 1), "page", "compound_mapcount.counter", times.wrapping_sub(1));
    }
    // One that leads nowhere.
    maker.set(place(9), "page", "compound_head", 0x13);
    let machine = Machine::of(maker);
    let kernel = machine.kernel();
    let mut census = kernel.page_census().unwrap();
    let mut used = |number: u64| census.of(number << 12).map(|used| (used.owner, used.alone));
    assert_eq!(used(3).unwrap(), (PageOwner::Anonymous, true));
    assert_eq!(used(4).unwrap(), (PageOwner::Anonymous, false));
    assert_eq!(used(5).unwrap(), (PageOwner::File, true));
    assert_eq!(used(6).unwrap(), (PageOwner::Other, true));
    assert_eq!(used(512).unwrap(), (PageOwner::Anonymous, true));
    assert_eq!(used(513).unwrap(), (PageOwner::Anonymous, true));
    assert_eq!(used(768).unwrap(), (PageOwner::Anonymous, false));
    assert_eq!(used(769).unwrap(), (PageOwner::Anonymous, false));
    assert!(used(9).is_err());
    assert_eq!(kernel.page_owner(5 << 12).unwrap(), PageOwner::File);
}

#[test]
fn pages_of_all_sizes_and_kinds_are_found() {
    let machine = Machine::new();
    let kernel = machine.kernel();
    let space = kernel.process(7).unwrap().address_space().unwrap().unwrap();
    let walk = space.mappings();
    assert!(walk.problems.is_empty(), "{:?}", walk.problems);
    assert_eq!(walk.found.iter().map(|found| found.start).collect::<Vec<_>>(), [CODE, DATA, HUGE]);
    assert_eq!(walk.found[0].permissions(), "r-xp");
    assert_eq!(walk.found[1].label().unwrap().as_deref(), Some("[heap]"));
    let tables = space.tables().unwrap();
    let data = walk.found[1].pages(&tables).found;
    let dirty = |entry: &Entry| matches!(entry, Entry::Page(Leaf { dirty: true, .. }));
    assert_eq!(data.iter().map(dirty).collect::<Vec<_>>(), [true, false, false, false]);
    assert_eq!(data[3], Entry::Swap { address: DATA + 0x3000, raw: 0xffff_0000_0000_0400 });
    let mut byte = [0];
    space.read(DATA + 0x2001, &mut byte).unwrap();
    assert_eq!(byte, [0xa3], "a page under PROT_NONE");
    assert!(space.read(DATA + 0x3000, &mut byte).is_err(), "a page in swap");
    let huge = walk.found[2].pages(&tables).found;
    assert!(
        matches!(huge[..], [Entry::Page(Leaf { size: 0x20_0000, physical: 0, dirty: true, .. })]),
        "{huge:?}"
    );
}

#[test]
fn registers_come_from_the_top_of_the_kernel_stack() {
    let machine = Machine::new();
    let kernel = machine.kernel();
    let registers = kernel.process(7).unwrap().registers().unwrap();
    assert_eq!((registers.ip, registers.sp, registers.fs_base), (CODE + 0x123, DATA + 0x4000, 0x7000));
    assert!(kernel.process(1).unwrap().registers().is_err(), "it has no stack");
}

#[test]
fn a_core_is_an_elf_file_with_the_pages_in_their_places() {
    let machine = Machine::new();
    let kernel = machine.kernel();
    let mut core = std::io::Cursor::new(Vec::new());
    let walk = kernel.process(7).unwrap().write_core(&mut core).unwrap();
    assert!(walk.problems.is_empty(), "{:?}", walk.problems);
    let bytes = core.into_inner();
    let header = object::elf::FileHeader64::<Endianness>::parse(&*bytes).unwrap();
    let endian = header.endian().unwrap();
    let notes = header.program_headers(endian, &*bytes).unwrap()[0].notes(endian, &*bytes).unwrap().unwrap();
    let mut notes = notes;
    let mut kinds = Vec::new();
    while let Some(note) = notes.next().unwrap() {
        kinds.push(note.n_type(endian));
    }
    assert_eq!(kinds, [1, 3, 6, 0x4649_4c45, 2]);
    let file = object::File::parse(&*bytes).unwrap();
    let byte = |address: u64| {
        let segment =
            file.segments().find(|s| (s.address()..s.address() + s.size()).contains(&address)).unwrap();
        segment.data().unwrap().get(usize::try_from(address - segment.address()).unwrap()).copied()
    };
    assert_eq!(
        (byte(CODE), byte(CODE + 0x1000)),
        (Some(0xa0), None),
        "what was not in memory is not in the core"
    );
    assert_eq!((byte(DATA + 5), byte(DATA + 0x1fff), byte(DATA + 0x4000)), (Some(0xa1), Some(0xa2), None));
    assert!(kernel.process(1).unwrap().write_core(&mut std::io::Cursor::new(Vec::new())).is_err());
}

#[test]
fn what_waits_in_sockets_is_found() {
    let machine = Machine::with_sockets();
    let kernel = machine.kernel();
    let files = kernel.process(7).unwrap().descriptors().found;
    let file = |number: u32| files.iter().find(|found| found.number == number).unwrap().file;
    let connection = file(6).tcp_connection().unwrap();
    assert_eq!(connection.received, b"what was received here");
    assert_eq!(connection.unacknowledged, b"sent, and to be");
    assert_eq!((connection.unsent, connection.uncounted), (0, 0), "the packet may be on its way");
    assert_eq!(connection.rcv_nxt, READ.wrapping_add(22));
    assert!(connection.has_microseconds && !connection.no_delay);
    assert_eq!(file(6).unread_parts().unwrap(), [9]);
    let waiting = file(7).waiting_connections().unwrap();
    assert_eq!(waiting[0].unwrap().remote.to_string(), "127.0.0.2:80");
    let datagram = file(8).datagrams().unwrap().remove(0).unwrap();
    assert_eq!((datagram.source.to_string().as_str(), &*datagram.bytes), ("10.0.0.1:53", &b"datagram"[..]));
}

/// Reads the TCP connection of a machine of which one word was changed: where and to what, by its socket.
fn connection_with(
    changed: impl FnOnce(Object<'_>) -> (u64, u64),
) -> Result<crate::TcpConnection, crate::Error> {
    let connection =
        |kernel: &crate::Kernel| kernel.process(7).unwrap().descriptors().found[2].file.tcp_connection();
    let mut machine = Machine::with_sockets();
    let kernel = machine.kernel();
    assert!(connection(&kernel).is_ok());
    let (place, value) = changed(kernel.process(7).unwrap().descriptors().found[2].file.sock().unwrap());
    poke(&mut machine, place, value);
    connection(&machine.kernel())
}

#[test]
fn packets_that_hang_on_themselves_are_refused() {
    let error = connection_with(|sock| {
        let packet = packets(sock, "sk_write_queue").unwrap()[0];
        let shared = packet.u64("head").unwrap() + packet.u64("end").unwrap();
        let shared = sock.kernel().object("skb_shared_info", shared).unwrap();
        let further = shared.u64("frag_list").unwrap();
        (further, further)
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("it hangs on itself"), "{error}");
}

#[test]
fn what_a_packet_cannot_give_is_not_taken_from_where_another_may_have_been_cut() {
    let read = connection_with(|sock| {
        (packets(sock, "sk_write_queue").unwrap()[0].address_of("head").unwrap(), 0x1234)
    });
    assert!(read.is_err());
}

#[test]
fn a_queue_takes_no_more_memory_than_its_packets() {
    let error = connection_with(|sock| {
        let tcp = sock.kernel().object("tcp_sock", sock.address()).unwrap();
        let una = tcp.u64("snd_una").unwrap();
        (tcp.address_of("write_seq").unwrap(), una << 32 | (una + (1 << 29)))
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("16777222 bytes that were behind its first 9 are not there"), "{error}");
}

/// Overwrites eight bytes at a virtual or physical address.
fn poke(machine: &mut Machine, address: u64, value: u64) {
    let at = usize::try_from(address & 0xffff_ffff).unwrap();
    machine.maker.bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

#[test]
fn a_broken_link_between_tasks_costs_no_task() {
    let mut machine = Machine::new();
    // init's next: what comes after it is found from the other end.
    let init = machine.kernel().process(1).unwrap().object().address();
    poke(&mut machine, init + 24, 0xdead_beef);
    let kernel = machine.kernel();
    let walk = kernel.processes();
    assert_eq!(walk.found.len(), 2);
    assert_eq!(walk.problems.len(), 1, "{:?}", walk.problems);
    assert!(walk.problems[0].to_string().contains("0xdeadbeef"), "{}", walk.problems[0]);
}

#[test]
fn a_task_that_leads_back_to_itself_ends_the_walk() {
    let mut machine = Machine::new();
    let init = machine.kernel().process(1).unwrap().object().address();
    poke(&mut machine, init + 24, init + 24);
    let kernel = machine.kernel();
    let walk = kernel.processes();
    assert_eq!(walk.found.len(), 2);
    assert!(!walk.problems.is_empty());
}

#[test]
fn a_broken_node_costs_its_own_mappings() {
    let mut machine = Machine::new();
    let node = machine.leaf_node;
    // The slot of the first mapping points to nowhere.
    poke(&mut machine, node + 128 + 8, 0xffff_8880_7fff_0000);
    let kernel = machine.kernel();
    let walk = kernel.process(7).unwrap().address_space().unwrap().unwrap().mappings();
    assert_eq!(walk.found.iter().map(|found| found.start).collect::<Vec<_>>(), [DATA, HUGE]);
    assert_eq!(walk.problems.len(), 1, "{:?}", walk.problems);
}

#[test]
fn names_that_go_round_are_reported() {
    let mut machine = Machine::new();
    let dentry = machine.dentry;
    let top = machine.kernel().object("dentry", dentry).unwrap().u64("d_parent").unwrap();
    poke(&mut machine, top, dentry);
    let kernel = machine.kernel();
    let file = kernel.process(7).unwrap().descriptors().found[0].file;
    // The mount's root is still recognized by its address; without that, the walk would never end.
    assert!(file.path().is_ok());
    let other = kernel.object("dentry", dentry).unwrap().address();
    poke(&mut machine, dentry, other + 0x40);
    assert!(machine.kernel().process(7).unwrap().descriptors().found[0].file.path().is_err());
}

#[test]
fn page_tables_that_contain_themselves_are_passed_over() {
    let mut machine = Machine::new();
    let kernel = machine.kernel();
    let root = kernel.process(7).unwrap().address_space().unwrap().unwrap().object().u64("pgd").unwrap();
    // The root is its own second and third level.
    poke(&mut machine, root, (root & 0xffff_ffff) | 7);
    let kernel = machine.kernel();
    let space = kernel.process(7).unwrap().address_space().unwrap().unwrap();
    let tables = space.tables().unwrap();
    let mut problems = 0;
    tables.walk(0, 1 << 47, &mut |_| {}, &mut |_, _, _| problems += 1);
    assert_eq!(problems, 1);
}

#[test]
fn a_page_outside_the_memory_is_reported() {
    let mut machine = Machine::new();
    let table = machine.table;
    poke(&mut machine, table, 0x7777_7000 | 7);
    let kernel = machine.kernel();
    let space = kernel.process(7).unwrap().address_space().unwrap().unwrap();
    let walk = space.mappings().found[1].pages(&space.tables().unwrap());
    assert_eq!((walk.found.len(), walk.problems.len()), (3, 1));
}

#[test]
fn a_file_of_anything_holds_no_kernel() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), vec![0x5a; 1 << 20]).unwrap();
    let memory = crate::open_memory(file.path(), Layout::Q35).unwrap();
    assert!(matches!(crate::Kernel::open(Box::new(memory)), Err(crate::Error::NoKernel)));
    for broken in [&b"\x7fELF"[..], b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x04\0"] {
        std::fs::write(file.path(), broken).unwrap();
        assert!(matches!(crate::open_memory(file.path(), Layout::Q35), Err(crate::Error::NotAnImage { .. })));
    }
}

/// Returns a change to make: where, and what to put there.
fn change() -> impl Strategy<Value = (usize, u64)> {
    let direct = 0xffff_8880_0000_0000_u64;
    let value = prop_oneof![
        any::<u64>(),
        (0..SIZE as u64).prop_map(move |offset| direct + offset),
        (0..SIZE as u64).prop_map(move |offset| direct + (offset & !0xff)),
        (0..SIZE as u64).prop_map(|offset| (offset & !0xfff) | 0x67),
        Just(0),
        Just(u64::MAX),
        (0..64_u32).prop_map(|bit| 1 << bit),
    ];
    // Structures lie from 64 KiB on and take about 100 KiB.
    ((0x1_0000..0x3_0000_usize / 8 * 8).prop_map(|at| at / 8 * 8), value)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    /// Any bytes may be overwritten: it neither panics nor loops.
    #[test]
    fn anything_broken_ends_well(changes in prop::collection::vec(change(), 1..40)) {
        let machine = Machine::with_sockets();
        let mut bytes = machine.maker.bytes.clone();
        for (at, value) in changes {
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        walk_all(&machine.kernel_with(bytes));
    }

    /// Cores of machines with broken headers open or are refused, and what opens can be read.
    #[test]
    fn broken_cores_are_refused_or_read(changes in prop::collection::vec((0..1024_usize, any::<u8>()), 0..24)) {
        let machine = Machine::new();
        let kernel = machine.kernel();
        let mut core = std::io::Cursor::new(Vec::new());
        kernel.process(7).unwrap().write_core(&mut core).unwrap();
        let mut bytes = core.into_inner();
        for (at, value) in changes {
            bytes[at] = value;
        }
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &bytes).unwrap();
        if let Ok(memory) = crate::open_memory(file.path(), Layout::Linear) {
            use crate::PhysicalMemory as _;
            for segment in memory.segments().to_vec() {
                let mut byte = [0];
                memory.read(segment.physical, &mut byte).unwrap();
                memory.read(segment.physical + segment.length - 1, &mut byte).unwrap();
            }
        }
    }
}

#[test]
fn the_whole_machine_is_walked() {
    assert!(walk_all(&Machine::new().kernel()) > 10);
}
