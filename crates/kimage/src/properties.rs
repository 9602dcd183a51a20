//! Generated machines: trees of every shape are read as they were made, and what is overwritten in them costs no more
//! than an error, and an end is found.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::synthetic::{DIRECT, Machine, Maker, SIZE};
use crate::{IdKind, Pages, Task};

const PAGE: u64 = 4096;
/// `struct page`s: one for each page of the machine.
const PAGES: u64 = SIZE as u64 / PAGE;

/// Lays out the array of `struct page`s, and gives where it begins.
fn page_array(m: &mut Maker) -> u64 {
    let array = DIRECT + m.room(PAGES * 64, 64);
    let variable = DIRECT + m.room(8, 8);
    m.write_u64(variable, array);
    m.symbols.push(("vmemmap_base", variable));
    array
}

/// A large page or a small one, at an index of its file, that may be unwritten.
#[derive(Clone, Copy, Debug)]
struct Folio {
    index: u64,
    order: u32,
    unwritten: bool,
}

/// Builds a file's tree of pages, as the kernel would, and gives its root.
fn xarray(m: &mut Maker, array: u64, folios: &[Folio]) -> (u64, BTreeMap<u64, (u64, bool)>) {
    let mut slots: BTreeMap<u64, (u64, bool)> = BTreeMap::new();
    let mut expected = BTreeMap::new();
    let mut number = 16;
    for folio in folios {
        let count = 1_u64 << folio.order;
        if (folio.index..folio.index + count).any(|index| slots.contains_key(&index))
            || number + count > PAGES
        {
            continue;
        }
        let page = array + number * 64;
        m.set(page, "page", "index", folio.index);
        slots.insert(folio.index, (page, folio.unwritten));
        for step in 0..count {
            if step > 0 {
                // A sibling names the slot of the large page's first part.
                slots.insert(folio.index + step, ((folio.index % 64) << 2 | 2, folio.unwritten));
            }
            expected.insert(folio.index + step, ((number + step) * PAGE, folio.unwritten));
        }
        number += count;
    }
    let last = slots.keys().last().copied().unwrap_or(0);
    if slots.len() == 1 && last == 0 {
        return (slots[&0].0, expected);
    }
    let mut shift = 0;
    while last >> shift >= 64 {
        shift += 6;
    }
    if slots.is_empty() {
        return (0, expected);
    }
    (node(m, &slots, 0, shift) + 2, expected)
}

fn node(m: &mut Maker, slots: &BTreeMap<u64, (u64, bool)>, base: u64, shift: u64) -> u64 {
    let node = m.make("xa_node");
    m.set(node, "xa_node", "shift", shift);
    let (at, mut marks) = (m.at(node, "xa_node", "slots"), 0_u64);
    for slot in 0..64_u64 {
        let (from, to) = (base + (slot << shift), base + ((slot + 1) << shift));
        let below: Vec<_> = slots.range(from..to).map(|(_, found)| *found).collect();
        if below.is_empty() {
            continue;
        }
        let entry = if shift == 0 { below[0].0 } else { self::node(m, slots, from, shift - 6) + 2 };
        m.write_u64(at + slot * 8, entry);
        marks |= u64::from(below.iter().any(|(_, unwritten)| *unwritten)) << slot;
    }
    let at = m.at(node, "xa_node", "marks");
    m.write_u64(at, marks);
    node
}

fn folio() -> impl Strategy<Value = Folio> {
    let index = prop_oneof![0..70_u64, 0..5000_u64, 0..1_000_000_u64];
    (index, 0..4_u32, any::<bool>()).prop_map(|(index, order, unwritten)| Folio {
        index: index >> order << order,
        order,
        unwritten,
    })
}

/// A machine with one file's pages, and where the `address_space` is.
fn file(folios: &[Folio]) -> (Machine, u64, BTreeMap<u64, (u64, bool)>) {
    let mut m = Maker::new();
    let array = page_array(&mut m);
    let mapping = m.make("address_space");
    let (root, expected) = xarray(&mut m, array, folios);
    m.set(mapping, "address_space", "i_pages.xa_head", root);
    (Machine::of(m), mapping, expected)
}

/// Builds a process' tree of mappings with nodes of the widths that are asked for.
fn mappings(ranges: &[(u64, u64)], widths: &[usize]) -> (Machine, Vec<(u64, u64)>) {
    let mut m = Maker::new();
    let idle = m.task(0, "swapper", None);
    let task = m.task(1, "init", Some(idle));
    let tasks = [idle, task].map(|task| m.at(task, "task_struct", "tasks"));
    m.ring(&tasks);
    m.symbols.push(("init_task", idle));
    let space = m.make("mm_struct");
    m.set(task, "task_struct", "mm", space);
    let (mut entries, mut expected, mut end) = (Vec::new(), Vec::new(), 0);
    for &(gap, pages) in ranges {
        let start = end + gap * PAGE;
        if gap > 0 {
            entries.push((start - 1, 0));
        }
        end = start + pages * PAGE;
        entries.push((end - 1, m.mapping(space, start, end, 3, 0)));
        expected.push((start, end));
    }
    let mut widths = widths.iter().cycle();
    let mut level = 0;
    loop {
        let (kind, most, mark) =
            if level == 0 { ("maple_range_64", 14, 0xc) } else { ("maple_arange_64", 8, 0x1c) };
        let mut above = Vec::new();
        let mut rest = &entries[..];
        while !rest.is_empty() {
            let width = (*widths.next().unwrap()).clamp(2, most).min(rest.len());
            let (these, others) = rest.split_at(width);
            let node = m.node(kind, these);
            above.push((these[width - 1].0, node | mark));
            rest = others;
        }
        if above.len() == 1 {
            let root = m.at(space, "mm_struct", "mm_mt") + 8;
            m.write_u64(root, above[0].1 | 2);
            return (Machine::of(m), expected);
        }
        (entries, level) = (above, level + 1);
    }
}

/// A tree of names in a file system in memory: each has its parent's place among those before it, and a size if it is a
/// file.
fn names(tree: &[(usize, Option<u8>)]) -> (Machine, BTreeMap<String, Option<Vec<u8>>>) {
    let mut m = Maker::new();
    let array = page_array(&mut m);
    let idle = m.task(0, "swapper", None);
    let task = m.task(1, "init", Some(idle));
    let tasks = [idle, task].map(|task| m.at(task, "task_struct", "tasks"));
    m.ring(&tasks);
    m.symbols.push(("init_task", idle));
    let (proxy, space, mount) = (m.make("nsproxy"), m.make("mnt_namespace"), m.make("mount"));
    m.set(task, "task_struct", "nsproxy", proxy);
    m.set(proxy, "nsproxy", "mnt_ns", space);
    m.set(space, "mnt_namespace", "root", mount);
    let (kind, block, text) = (m.make("file_system_type"), m.make("super_block"), m.text("ramfs"));
    m.set(kind, "file_system_type", "name", text);
    m.set(block, "super_block", "s_type", kind);
    m.set(mount, "mount", "mnt_parent", mount);
    m.set(mount, "mount", "mnt.mnt_sb", block);
    let ring = m.at(mount, "mount", "mnt_mounts");
    m.ring(&[ring]);

    let mut page = 256;
    let mut inode = |m: &mut Maker, number: u64, content: Option<&[u8]>| {
        let inode = m.make("inode");
        let mapping = m.make("address_space");
        m.set(inode, "inode", "i_mode", if content.is_some() { 0o100_600 } else { 0o040_700 });
        m.set(inode, "inode", "i_ino", number);
        m.set(inode, "inode", "i_sb", block);
        m.set(inode, "inode", "i_nlink", 1);
        m.set(inode, "inode", "i_mapping", mapping);
        if let Some(content) = content.filter(|content| !content.is_empty()) {
            m.set(inode, "inode", "i_size", content.len() as u64);
            m.set(mapping, "address_space", "i_pages.xa_head", array + page * 64);
            m.write(page * PAGE, content);
            page += 1;
        }
        inode
    };
    let root = m.make("dentry");
    let slash = m.text("/");
    m.set(root, "dentry", "d_parent", root);
    m.set(root, "dentry", "d_name.len", 1);
    m.set(root, "dentry", "d_name.name", slash);
    let top = inode(&mut m, 1, None);
    m.set(root, "dentry", "d_inode", top);
    m.set(mount, "mount", "mnt.mnt_root", root);
    let mut folders = vec![(root, String::new(), Vec::new())];
    let mut expected = BTreeMap::new();
    for (number, &(parent, size)) in tree.iter().enumerate() {
        let place = parent % folders.len();
        let (above, path) = (folders[place].0, format!("{}/n{number}", folders[place].1));
        let dentry = m.make("dentry");
        let name = format!("n{number}");
        let text = m.text(&name);
        m.set(dentry, "dentry", "d_parent", above);
        m.set(dentry, "dentry", "d_name.len", name.len() as u64);
        m.set(dentry, "dentry", "d_name.name", text);
        m.set(dentry, "dentry", "d_hash.pprev", DIRECT);
        let content = size.map(|size| vec![u8::try_from(number % 251).unwrap(); usize::from(size)]);
        let inode = inode(&mut m, number as u64 + 2, content.as_deref());
        m.set(dentry, "dentry", "d_inode", inode);
        let link = m.at(dentry, "dentry", "d_child");
        folders[place].2.push(link);
        if content.is_none() {
            folders.push((dentry, path.clone(), Vec::new()));
        }
        expected.insert(path, content);
    }
    for (dentry, _, children) in folders {
        let mut ring = vec![m.at(dentry, "dentry", "d_subdirs")];
        ring.extend(children);
        m.ring(&ring);
    }
    (Machine::of(m), expected)
}

fn init(kernel: &crate::Kernel) -> Task<'_> {
    kernel.process(1).unwrap()
}

/// Words to overwrite, by their places among those that are not zero.
fn damage() -> impl Strategy<Value = Vec<(prop::sample::Index, u64)>> {
    let value = prop_oneof![
        any::<u64>(),
        (0..SIZE as u64).prop_map(|offset| DIRECT + offset),
        (0..SIZE as u64).prop_map(|offset| DIRECT + (offset & !0xff) + 2),
        Just(0),
        Just(u64::MAX),
        (0..64_u32).prop_map(|bit| 1 << bit),
    ];
    prop::collection::vec((any::<prop::sample::Index>(), value), 1..12)
}

fn damaged(machine: &Machine, changes: &[(prop::sample::Index, u64)]) -> Vec<u8> {
    let mut bytes = machine.maker.bytes.clone();
    let used: Vec<usize> =
        (0..bytes.len()).step_by(8).filter(|&at| bytes[at..at + 8].iter().any(|&byte| byte != 0)).collect();
    for (place, value) in changes {
        let at = used[place.index(used.len())];
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn a_files_pages_are_found_as_they_were_made(folios in prop::collection::vec(folio(), 0..40)) {
        let (machine, mapping, expected) = file(&folios);
        let kernel = machine.kernel();
        let mapping = kernel.object("address_space", mapping).unwrap();
        let all = kernel.cached_pages(mapping, Pages::All).unwrap();
        let found: BTreeMap<u64, u64> = all.iter().map(|page| (page.index, page.physical)).collect();
        prop_assert_eq!(all.len(), found.len());
        let wanted: BTreeMap<u64, u64> = expected.iter().map(|(&index, &(physical, _))| (index, physical)).collect();
        prop_assert_eq!(&found, &wanted);
        // A file of one page has no marks: it counts as unwritten.
        let unwritten = kernel.cached_pages(mapping, Pages::Unwritten).unwrap();
        let found: Vec<u64> = unwritten.iter().map(|page| page.index).collect();
        let alone = expected.len() == 1 && expected.contains_key(&0);
        let wanted: Vec<u64> =
            expected.iter().filter(|(_, (_, unwritten))| *unwritten || alone).map(|(&index, _)| index).collect();
        prop_assert_eq!(found, wanted);
    }

    #[test]
    fn a_files_broken_pages_end(folios in prop::collection::vec(folio(), 1..40), changes in damage()) {
        let (machine, mapping, _) = file(&folios);
        let kernel = machine.kernel_with(damaged(&machine, &changes));
        let mapping = kernel.object("address_space", mapping).unwrap();
        for which in [Pages::All, Pages::Unwritten] {
            if let Ok(pages) = kernel.cached_pages(mapping, which) {
                for page in pages {
                    let _ = (page.is_valid(), page.buffers());
                }
            }
        }
    }

    #[test]
    fn mappings_are_found_in_trees_of_any_shape(
        ranges in prop::collection::vec((0..5_u64, 1..9_u64), 2..150),
        widths in prop::collection::vec(2..15_usize, 1..9),
    ) {
        let (machine, expected) = mappings(&ranges, &widths);
        let kernel = machine.kernel();
        let walk = init(&kernel).address_space().unwrap().unwrap().mappings();
        prop_assert!(walk.problems.is_empty(), "{:?}", walk.problems);
        let found: Vec<(u64, u64)> = walk.found.iter().map(|mapping| (mapping.start, mapping.end)).collect();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn broken_mappings_end(
        ranges in prop::collection::vec((0..5_u64, 1..9_u64), 2..150),
        widths in prop::collection::vec(2..15_usize, 1..9),
        changes in damage(),
    ) {
        let (machine, expected) = mappings(&ranges, &widths);
        let kernel = machine.kernel_with(damaged(&machine, &changes));
        for task in kernel.processes().found {
            let _ = task.ids(IdKind::Process);
            if let Ok(Some(space)) = task.address_space() {
                prop_assert!(space.mappings().found.len() <= expected.len() + 16);
            }
        }
    }

    #[test]
    fn files_in_memory_are_found_under_their_names(
        tree in prop::collection::vec((any::<usize>(), prop::option::of(any::<u8>())), 0..60),
    ) {
        let (machine, expected) = names(&tree);
        let kernel = machine.kernel();
        let walk = init(&kernel).memory_files(&["no", "such"]);
        prop_assert!(walk.problems.is_empty(), "{:?}", walk.problems);
        let mut found = BTreeMap::new();
        for file in &walk.found {
            let is_file = file.attributes.mode & 0o170_000 == 0o100_000;
            let content = is_file.then(|| file.content(1 << 20).unwrap());
            found.insert(String::from_utf8(file.path.clone()).unwrap(), content);
        }
        prop_assert_eq!(found, expected);
        let mut seen = vec![String::new()];
        for file in &walk.found {
            let path = String::from_utf8(file.path.clone()).unwrap();
            prop_assert!(seen.contains(&path[..path.rfind('/').unwrap()].to_owned()), "a folder comes before {path}");
            seen.push(path);
        }
    }

    #[test]
    fn broken_names_end(
        tree in prop::collection::vec((any::<usize>(), prop::option::of(any::<u8>())), 1..60),
        changes in damage(),
    ) {
        let (machine, _) = names(&tree);
        let kernel = machine.kernel_with(damaged(&machine, &changes));
        for task in kernel.processes().found {
            for file in task.memory_files(&["n0", "n1"]).found {
                let _ = file.content(1 << 20);
            }
        }
    }
}
