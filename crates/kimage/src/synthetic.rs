//! A machine made by hand, for tests: a few MiB of memory with two processes in it, whose every structure is known.
//!
//! Structures are where a bump allocator puts them; their members where [`TYPES`] says. What is written goes through
//! [`Maker::set`], which looks the member up as the walkers do, so that table and contents cannot disagree.

pub(crate) mod sockets;

use crate::kallsyms::Symbols;
use crate::kernel::{Kernel, Windows};
use crate::memory::{PhysicalMemory, Segment};
use crate::types::{TableEntry, Types};
use crate::vmcoreinfo::Vmcoreinfo;
use crate::{Error, Result};

pub(crate) const SIZE: usize = 2 << 20;
/// Where the first structure is, in bytes of physical memory.
pub(crate) const FIRST: usize = 0x1_0000;
pub(crate) const DIRECT: u64 = 0xffff_8880_0000_0000;

const TYPES: &[TableEntry] = &[
    ("list_head", 16, &[("next", 0, 8), ("prev", 8, 8)]),
    (
        "task_struct",
        512,
        &[
            ("pid", 0, 4),
            ("tgid", 4, 4),
            ("comm", 8, 16),
            ("tasks", 24, 16),
            ("signal", 40, 8),
            ("real_parent", 48, 8),
            ("cred", 56, 8),
            ("mm", 64, 8),
            ("files", 72, 8),
            ("fs", 80, 8),
            ("thread_node", 88, 16),
            ("children", 104, 16),
            ("sibling", 120, 16),
            ("__state", 136, 4),
            ("exit_state", 140, 4),
            ("nsproxy", 224, 8),
            ("flags", 144, 4),
            ("thread_pid", 152, 8),
            ("stack", 160, 8),
            ("blocked", 168, 8),
            ("on_cpu", 176, 4),
            ("thread_info.flags", 184, 8),
            ("thread.fsbase", 192, 8),
            ("thread.gsbase", 200, 8),
            ("thread.ds", 208, 2),
            ("thread.es", 210, 2),
            ("thread.fsindex", 212, 2),
            ("thread.gsindex", 214, 2),
            ("thread.fpu.fpstate", 216, 8),
            ("cgroups", 232, 8),
        ],
    ),
    ("fpstate", 1024, &[("size", 0, 4), ("regs", 64, 960)]),
    ("signal_struct", 64, &[("thread_head", 0, 16), ("pids", 16, 32)]),
    ("pid", 64, &[("level", 0, 4), ("numbers", 16, 16)]),
    ("upid", 16, &[("nr", 0, 4)]),
    (
        "cred",
        128,
        &[
            ("uid.val", 0, 4),
            ("gid.val", 4, 4),
            ("suid.val", 8, 4),
            ("sgid.val", 12, 4),
            ("euid.val", 16, 4),
            ("egid.val", 20, 4),
            ("fsuid.val", 24, 4),
            ("fsgid.val", 28, 4),
            ("securebits", 32, 4),
            ("cap_inheritable", 40, 8),
            ("cap_permitted", 48, 8),
            ("cap_effective", 56, 8),
            ("cap_bset", 64, 8),
            ("cap_ambient", 72, 8),
            ("group_info", 80, 8),
        ],
    ),
    ("group_info", 64, &[("ngroups", 4, 4), ("gid", 8, 0)]),
    ("maple_tree", 16, &[("ma_root", 8, 8)]),
    (
        "mm_struct",
        256,
        &[
            ("mm_mt", 0, 16),
            ("pgd", 16, 8),
            ("exe_file", 24, 8),
            ("brk", 32, 8),
            ("start_brk", 40, 8),
            ("end_data", 48, 8),
            ("start_stack", 56, 8),
            ("arg_start", 64, 8),
            ("arg_end", 72, 8),
            ("saved_auxv", 80, 64),
        ],
    ),
    ("maple_range_64", 256, &[("pivot", 8, 120), ("slot", 128, 128)]),
    ("maple_arange_64", 256, &[("pivot", 8, 72), ("slot", 80, 80)]),
    (
        "vm_area_struct",
        128,
        &[
            ("vm_start", 0, 8),
            ("vm_end", 8, 8),
            ("vm_flags", 16, 8),
            ("vm_pgoff", 24, 8),
            ("vm_mm", 32, 8),
            ("vm_file", 40, 8),
            ("vm_ops", 48, 8),
            ("vm_private_data", 56, 8),
        ],
    ),
    ("fs_struct", 64, &[("pwd", 0, 16), ("root", 16, 16)]),
    ("path", 16, &[("mnt", 0, 8), ("dentry", 8, 8)]),
    ("files_struct", 64, &[("fdt", 0, 8)]),
    ("fdtable", 64, &[("max_fds", 0, 4), ("fd", 8, 8), ("close_on_exec", 16, 8), ("open_fds", 24, 8)]),
    (
        "file",
        64,
        &[
            ("f_path", 0, 16),
            ("f_inode", 16, 8),
            ("f_flags", 24, 4),
            ("f_pos", 32, 8),
            ("private_data", 40, 8),
        ],
    ),
    (
        "inode",
        256,
        &[
            ("i_mode", 0, 2),
            ("i_ino", 8, 8),
            ("i_sb", 16, 8),
            ("i_mapping", 24, 8),
            ("i_size", 32, 8),
            ("i_generation", 40, 4),
            ("i_uid.val", 44, 4),
            ("i_gid.val", 48, 4),
            ("i_nlink", 52, 4),
            ("i_rdev", 56, 4),
            ("i_atime_sec", 64, 8),
            ("i_atime_nsec", 72, 4),
            ("i_mtime_sec", 80, 8),
            ("i_mtime_nsec", 88, 4),
            ("i_ctime_sec", 96, 8),
            ("i_ctime_nsec", 104, 4),
            ("i_state", 112, 8),
            ("i_sb_list", 120, 16),
            ("i_link", 136, 8),
        ],
    ),
    ("super_block", 64, &[("s_type", 0, 8), ("s_dev", 8, 4), ("s_inodes", 16, 16)]),
    ("file_system_type", 64, &[("name", 0, 8)]),
    (
        "dentry",
        128,
        &[
            ("d_parent", 0, 8),
            ("d_name.len", 8, 4),
            ("d_name.name", 16, 8),
            ("d_hash.pprev", 24, 8),
            ("d_inode", 32, 8),
            ("d_subdirs", 40, 16),
            ("d_child", 56, 16),
        ],
    ),
    (
        "mount",
        128,
        &[
            ("mnt_parent", 0, 8),
            ("mnt_mountpoint", 8, 8),
            ("mnt", 16, 8),
            ("mnt.mnt_root", 16, 8),
            ("mnt.mnt_sb", 24, 8),
            ("mnt_mounts", 32, 16),
            ("mnt_child", 48, 16),
        ],
    ),
    (
        "pt_regs",
        168,
        &[
            ("r15", 0, 8),
            ("r14", 8, 8),
            ("r13", 16, 8),
            ("r12", 24, 8),
            ("bp", 32, 8),
            ("bx", 40, 8),
            ("r11", 48, 8),
            ("r10", 56, 8),
            ("r9", 64, 8),
            ("r8", 72, 8),
            ("ax", 80, 8),
            ("cx", 88, 8),
            ("dx", 96, 8),
            ("si", 104, 8),
            ("di", 112, 8),
            ("orig_ax", 120, 8),
            ("ip", 128, 8),
            ("cs", 136, 8),
            ("flags", 144, 8),
            ("sp", 152, 8),
            ("ss", 160, 8),
        ],
    ),
    (
        "page",
        64,
        &[
            ("flags", 0, 8),
            ("compound_head", 8, 8),
            ("mapping", 24, 8),
            ("index", 32, 8),
            ("private", 40, 8),
            ("_mapcount.counter", 48, 4),
            ("compound_mapcount.counter", 56, 4),
        ],
    ),
    ("address_space", 64, &[("i_pages.xa_head", 8, 8), ("a_ops", 16, 8)]),
    ("xa_node", 640, &[("shift", 0, 1), ("slots", 40, 512), ("marks", 552, 24)]),
    (
        "buffer_head",
        64,
        &[
            ("b_state", 0, 8),
            ("b_this_page", 8, 8),
            ("b_blocknr", 16, 8),
            ("b_size", 24, 8),
            ("b_data", 32, 8),
        ],
    ),
    ("journal_s", 64, &[("j_running_transaction", 0, 8), ("j_committing_transaction", 8, 8)]),
    (
        "transaction_s",
        64,
        &[("t_reserved_list", 0, 8), ("t_buffers", 8, 8), ("t_forget", 16, 8), ("t_checkpoint_list", 24, 8)],
    ),
    ("msg_msg", 48, &[("m_list", 0, 16), ("m_type", 16, 8), ("m_ts", 24, 8), ("next", 32, 8)]),
    ("msg_msgseg", 8, &[("next", 0, 8)]),
    ("journal_head", 64, &[("b_bh", 0, 8), ("b_tnext", 8, 8)]),
    ("nsproxy", 64, &[("mnt_ns", 24, 8)]),
    ("mnt_namespace", 64, &[("root", 8, 8)]),
    (
        "orc_entry",
        8,
        &[
            ("sp_offset", 0, 2),
            ("bp_offset", 2, 2),
            ("sp_reg", 4, 1),
            ("bp_reg", 5, 1),
            ("type", 6, 1),
            ("end", 7, 1),
        ],
    ),
    ("inactive_task_frame", 56, &[("bp", 40, 8), ("ret_addr", 48, 8)]),
    (
        "iov_iter",
        40,
        &[
            ("iter_type", 0, 1),
            ("data_source", 2, 1),
            ("iov_offset", 8, 8),
            ("count", 16, 8),
            ("ubuf", 24, 8),
            ("iov", 24, 8),
            ("nr_segs", 32, 8),
        ],
    ),
    ("iovec", 16, &[("iov_base", 0, 8), ("iov_len", 8, 8)]),
    ("kiocb", 48, &[("ki_filp", 0, 8), ("ki_pos", 8, 8), ("ki_complete", 16, 8)]),
    ("css_set", 32, &[("cgrp_links", 0, 16)]),
    ("cgrp_cset_link", 32, &[("cgrp", 0, 8), ("cgrp_link", 8, 16)]),
    ("cgroup", 32, &[("kn", 0, 8), ("root", 8, 8)]),
    ("cgroup_root", 32, &[("hierarchy_id", 0, 4), ("subsys_mask", 4, 4), ("name", 8, 16)]),
    ("kernfs_node", 32, &[("parent", 0, 8), ("name", 8, 8)]),
    ("hlist_node", 16, &[("next", 0, 8), ("pprev", 8, 8)]),
];

/// Returns the types of the machine.
fn types() -> Types {
    Types::from_table(&[TYPES, sockets::TYPES].concat())
}

/// Memory in a vector.
pub(crate) struct Ram {
    pub(crate) bytes: Vec<u8>,
    segments: [Segment; 1],
}

impl PhysicalMemory for Ram {
    fn segments(&self) -> &[Segment] {
        &self.segments
    }

    fn read(&self, physical: u64, into: &mut [u8]) -> Result<()> {
        let missing = Error::NoMemory { physical };
        let Ok(start) = usize::try_from(physical) else { return Err(missing) };
        let found = start.checked_add(into.len()).and_then(|end| self.bytes.get(start..end));
        into.copy_from_slice(found.ok_or(missing)?);
        Ok(())
    }
}

/// Puts structures into memory.
pub(crate) struct Maker {
    pub(crate) bytes: Vec<u8>,
    types: Types,
    next: u64,
    pub(crate) symbols: Vec<(&'static str, u64)>,
}

impl Maker {
    pub(crate) fn new() -> Self {
        Self { bytes: vec![0; SIZE], types: types(), next: FIRST as u64, symbols: Vec::new() }
    }

    /// Room for `size` bytes, at the physical address returned.
    pub(crate) fn room(&mut self, size: u64, align: u64) -> u64 {
        let at = self.next.next_multiple_of(align);
        self.next = at + size;
        at
    }

    /// Makes a structure full of zeros, at the virtual address returned.
    pub(crate) fn make(&mut self, kind: &'static str) -> u64 {
        let size = self.types.size(kind).unwrap();
        DIRECT + self.room(size, 256)
    }

    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) {
        let at = usize::try_from(if address >= DIRECT { address - DIRECT } else { address }).unwrap();
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn write_u64(&mut self, address: u64, value: u64) {
        self.write(address, &value.to_le_bytes());
    }

    pub(crate) fn at(&self, object: u64, kind: &'static str, path: &'static str) -> u64 {
        object + self.types.field(kind, path).unwrap().offset
    }

    pub(crate) fn set(&mut self, object: u64, kind: &'static str, path: &'static str, value: u64) {
        let field = self.types.field(kind, path).unwrap();
        let size = usize::try_from(field.size).unwrap();
        self.write(object + field.offset, &value.to_le_bytes()[..size]);
    }

    pub(crate) fn text(&mut self, text: &str) -> u64 {
        let at = DIRECT + self.room(text.len() as u64 + 1, 8);
        self.write(at, text.as_bytes());
        at
    }

    /// A ring of list heads.
    pub(crate) fn ring(&mut self, heads: &[u64]) {
        for (index, &head) in heads.iter().enumerate() {
            let next = heads[(index + 1) % heads.len()];
            self.write_u64(head, next);
            self.write_u64(next + 8, head);
        }
    }

    pub(crate) fn task(&mut self, pid: u64, name: &str, parent: Option<u64>) -> u64 {
        let task = self.make("task_struct");
        let kind = "task_struct";
        let signal = self.make("signal_struct");
        let number = self.make("pid");
        let cred = self.make("cred");
        self.set(task, kind, "pid", pid);
        self.set(task, kind, "tgid", pid);
        self.write(self.at(task, kind, "comm"), name.as_bytes());
        self.set(task, kind, "signal", signal);
        self.set(task, kind, "real_parent", parent.unwrap_or(task));
        self.set(task, kind, "cred", cred);
        self.set(cred, "cred", "uid.val", 1000 + pid);
        self.set(task, kind, "__state", 1);
        self.set(task, kind, "thread_pid", number);
        self.set(number, "pid", "level", 1);
        self.write(self.at(number, "pid", "numbers"), &u32::try_from(pid).unwrap().to_le_bytes());
        self.write(self.at(number, "pid", "numbers") + 16, &u32::try_from(pid + 100).unwrap().to_le_bytes());
        for index in 1..4 {
            self.write_u64(self.at(signal, "signal_struct", "pids") + index * 8, number);
        }
        let threads = self.at(signal, "signal_struct", "thread_head");
        self.ring(&[threads, self.at(task, kind, "thread_node")]);
        self.ring(&[self.at(task, kind, "children")]);
        task
    }

    /// Puts a task into one group of each of these hierarchies: a number, a name, and the names of the groups from the
    /// root's on.
    pub(crate) fn control_groups(&mut self, task: u64, hierarchies: &[(u64, &str, &[&str])]) {
        let set = self.make("css_set");
        self.set(task, "task_struct", "cgroups", set);
        let mut ring = vec![self.at(set, "css_set", "cgrp_links")];
        for (number, name, groups) in hierarchies {
            let (link, group, root) =
                (self.make("cgrp_cset_link"), self.make("cgroup"), self.make("cgroup_root"));
            let mut directory = self.make("kernfs_node");
            for name in *groups {
                let inner = self.make("kernfs_node");
                let text = self.text(name);
                self.set(inner, "kernfs_node", "name", text);
                self.set(inner, "kernfs_node", "parent", directory);
                directory = inner;
            }
            self.set(root, "cgroup_root", "hierarchy_id", *number);
            self.set(root, "cgroup_root", "subsys_mask", 5);
            self.write(self.at(root, "cgroup_root", "name"), name.as_bytes());
            self.set(group, "cgroup", "kn", directory);
            self.set(group, "cgroup", "root", root);
            self.set(link, "cgrp_cset_link", "cgrp", group);
            ring.push(self.at(link, "cgrp_cset_link", "cgrp_link"));
        }
        self.ring(&ring);
    }

    /// Makes a mapping's structure.
    pub(crate) fn mapping(&mut self, space: u64, start: u64, end: u64, flags: u64, file: u64) -> u64 {
        let mapping = self.make("vm_area_struct");
        for (path, value) in
            [("vm_start", start), ("vm_end", end), ("vm_flags", flags), ("vm_mm", space), ("vm_file", file)]
        {
            self.set(mapping, "vm_area_struct", path, value);
        }
        mapping
    }

    /// Makes a node of a maple tree with `(last address, slot)`s.
    pub(crate) fn node(&mut self, kind: &'static str, entries: &[(u64, u64)]) -> u64 {
        let node = self.make(kind);
        let (pivot, slot) = (self.at(node, kind, "pivot"), self.at(node, kind, "slot"));
        for (index, &(last, child)) in (0..).zip(entries) {
            self.write_u64(pivot + index * 8, last);
            self.write_u64(slot + index * 8, child);
        }
        node
    }
}

/// Where things of the machine lie.
pub(crate) struct Machine {
    pub(crate) maker: Maker,
    /// The lowest page table.
    pub(crate) table: u64,
    pub(crate) leaf_node: u64,
    pub(crate) dentry: u64,
    /// The words with the open descriptors and with those that execve(2) closes, and the array of files behind them.
    descriptors: u64,
}

pub(crate) const CODE: u64 = 0x40_0000;
pub(crate) const DATA: u64 = 0x60_0000;
pub(crate) const HUGE: u64 = 0x80_0000;

impl Machine {
    pub(crate) fn new() -> Self {
        let mut m = Maker::new();
        let kind = "task_struct";
        let idle = m.task(0, "swapper", None);
        let init = m.task(1, "init", Some(idle));
        let process = m.task(7, "worker", Some(init));
        let tasks = [idle, init, process].map(|task| m.at(task, kind, "tasks"));
        m.ring(&tasks);
        m.ring(&[m.at(init, kind, "children"), m.at(process, kind, "sibling")]);
        m.symbols.push(("init_task", idle));
        m.control_groups(process, &[(0, "", &["outer", "inner"]), (7, "batch", &[])]);

        // /data/file, on a file system that is mounted at /data.
        let system = m.make("file_system_type");
        let block = m.make("super_block");
        let name = m.text("ext4");
        m.set(system, "file_system_type", "name", name);
        m.set(block, "super_block", "s_type", system);
        let inode = m.make("inode");
        m.set(inode, "inode", "i_mode", 0o100_644);
        m.set(inode, "inode", "i_ino", 17);
        m.set(inode, "inode", "i_sb", block);
        let mut dentry = |name: &str, parent: Option<u64>| {
            let dentry = m.make("dentry");
            let text = m.text(name);
            m.set(dentry, "dentry", "d_parent", parent.unwrap_or(dentry));
            m.set(dentry, "dentry", "d_name.len", name.len() as u64);
            m.set(dentry, "dentry", "d_name.name", text);
            m.set(dentry, "dentry", "d_hash.pprev", u64::from(parent.is_some()) * DIRECT);
            dentry
        };
        let root = dentry("/", None);
        let point = dentry("data", Some(root));
        let top = dentry("/", None);
        let leaf = dentry("file", Some(top));
        let (outer, inner) = (m.make("mount"), m.make("mount"));
        m.set(outer, "mount", "mnt_parent", outer);
        m.set(outer, "mount", "mnt.mnt_root", root);
        m.set(inner, "mount", "mnt_parent", outer);
        m.set(inner, "mount", "mnt_mountpoint", point);
        m.set(inner, "mount", "mnt.mnt_root", top);
        let inner_mnt = m.at(inner, "mount", "mnt");
        let file = m.make("file");
        m.set(file, "file", "f_inode", inode);
        m.set(file, "file", "f_flags", 0o2);
        m.set(file, "file", "f_pos", 4711);
        m.write_u64(m.at(file, "file", "f_path"), inner_mnt);
        m.write_u64(m.at(file, "file", "f_path") + 8, leaf);
        let fs = m.make("fs_struct");
        for path in ["pwd", "root"] {
            let at = m.at(fs, "fs_struct", path);
            let mount = m.at(outer, "mount", "mnt");
            m.write_u64(at, mount);
            m.write_u64(at + 8, if path == "pwd" { point } else { root });
        }
        m.set(process, kind, "fs", fs);
        let (files, table) = (m.make("files_struct"), m.make("fdtable"));
        let arrays = DIRECT + m.room(1024, 8);
        m.set(files, "files_struct", "fdt", table);
        m.set(table, "fdtable", "max_fds", 64);
        m.set(table, "fdtable", "open_fds", arrays);
        m.set(table, "fdtable", "close_on_exec", arrays + 8);
        m.set(table, "fdtable", "fd", arrays + 16);
        m.write_u64(arrays, 1 << 3 | 1 << 5);
        m.write_u64(arrays + 8, 1 << 5);
        m.write_u64(arrays + 16 + 3 * 8, file);
        m.write_u64(arrays + 16 + 5 * 8, file);
        m.set(process, kind, "files", files);

        // Three mappings, in a tree of two levels.
        let space = m.make("mm_struct");
        let code = m.mapping(space, CODE, CODE + 0x3000, 0x5, file);
        let data = m.mapping(space, DATA, DATA + 0x5000, 0x3, 0);
        let huge = m.mapping(space, HUGE, HUGE + 0x20_0000, 0x3, 0);
        let leaf_node = m.node(
            "maple_range_64",
            &[(CODE - 1, 0), (CODE + 0x2fff, code), (DATA - 1, 0), (DATA + 0x4fff, data)],
        );
        let other = m.node("maple_range_64", &[(HUGE - 1, 0), (HUGE + 0x1f_ffff, huge), (u64::MAX, 0)]);
        let last = m.at(leaf_node, "maple_range_64", "pivot") + 24;
        m.write_u64(last, DATA + 0x4fff);
        let top_node =
            m.node("maple_arange_64", &[(DATA + 0x4fff, leaf_node | 0xc), (u64::MAX, other | 0xc)]);
        m.write_u64(m.at(space, "mm_struct", "mm_mt") + 8, top_node | 0x1e);
        m.set(space, "mm_struct", "brk", DATA + 0x5000);
        m.set(space, "mm_struct", "start_brk", DATA);
        m.set(process, kind, "mm", space);

        // Page tables: 4 KiB pages of all kinds, and one of 2 MiB.
        let mut tables = [0; 5].map(|_: u8| m.room(4096, 4096));
        let [pgd, pud, pmd, low, low_data] = tables;
        tables.sort_unstable();
        m.write_u64(pgd, pud | 7);
        m.write_u64(pud, pmd | 7);
        m.write_u64(pmd + 2 * 8, low | 7);
        m.write_u64(pmd + 3 * 8, low_data | 7);
        m.write_u64(pmd + 4 * 8, 0x80 | 0x40 | 7);
        let pages = [0; 4].map(|_: u8| m.room(4096, 4096));
        for (fill, &page) in (0xa0..).zip(&pages) {
            m.write(page, &[fill; 4096]);
        }
        m.write_u64(low, pages[0] | 5);
        m.write_u64(low_data, pages[1] | 0x67);
        m.write_u64(low_data + 8, pages[2] | 7);
        // PROT_NONE with inverted address bits, and a page in swap.
        m.write_u64(low_data + 16, (!pages[3] & 0x000f_ffff_ffff_f000) | 0x100);
        m.write_u64(low_data + 24, 0xffff_0000_0000_0400);
        m.set(space, "mm_struct", "pgd", DIRECT + pgd);

        // A kernel stack with registers at its top.
        let stack = DIRECT + m.room(16 << 10, 4096);
        m.set(process, kind, "stack", stack);
        let saved = stack + (16 << 10) - 168;
        m.set(saved, "pt_regs", "ip", CODE + 0x123);
        m.set(saved, "pt_regs", "cs", 0x33);
        m.set(saved, "pt_regs", "sp", DATA + 0x4000);
        m.set(process, kind, "thread.fsbase", 0x7000);
        let state = m.make("fpstate");
        m.set(state, "fpstate", "size", 576);
        m.set(process, kind, "thread.fpu.fpstate", state);
        Self { maker: m, table: low_data, leaf_node, dentry: leaf, descriptors: arrays }
    }

    /// A machine with nothing in it but what is made.
    pub(crate) fn of(maker: Maker) -> Self {
        Self { maker, table: 0, leaf_node: 0, dentry: 0, descriptors: 0 }
    }

    /// Returns the machine as a kernel to walk.
    pub(crate) fn kernel(&self) -> Kernel {
        self.kernel_with(self.maker.bytes.clone())
    }

    /// Returns the same with other contents.
    pub(crate) fn kernel_with(&self, bytes: Vec<u8>) -> Kernel {
        let segments = [Segment { physical: 0, length: bytes.len() as u64, offset: 0 }];
        let info = Vmcoreinfo::parse(b"OSRELEASE=made\nSYMBOL(x)=0\n", None).unwrap();
        let mut symbols = Symbols::default();
        for (name, address) in &self.maker.symbols {
            symbols.insert(name, *address);
        }
        let windows = Windows { phys_base: 0, direct: Some(DIRECT), tables: 0, levels: 4 };
        Kernel::assemble(Box::new(Ram { bytes, segments }), info, symbols, types(), windows)
    }
}

/// Walks everything there is, as a rescue would; what matters is that it comes back.
pub(crate) fn walk_all(kernel: &Kernel) -> usize {
    let mut count = 0;
    let processes = kernel.processes();
    for task in &processes.found {
        count += task.threads().found.len() + task.children().found.len();
        let _ = (task.credentials(), task.name(), task.state(), task.parent(), task.directories());
        let _ = (task.registers(), task.float_state(), task.executable(), task.ids(crate::IdKind::Session));
        count += task.control_groups().found.len();
        for descriptor in task.descriptors().found {
            let file = descriptor.file;
            count += usize::from(file.path().is_ok());
            let _ = (file.kind(), file.mode(), file.position());
            let _ = (file.inet_socket(), file.unread_parts(), file.waiting_connections());
            count += file.tcp_connection().map_or(0, |connection| connection.received.len());
            count += file.datagrams().map_or(0, |datagrams| datagrams.len());
        }
        if let Ok(Some(space)) = task.address_space() {
            let tables = space.tables();
            for mapping in space.mappings().found {
                let _ = mapping.label();
                count += tables.as_ref().map_or(0, |tables| mapping.pages(tables).found.len());
            }
            let mut core = std::io::Cursor::new(Vec::new());
            let _ = task.write_core(&mut core);
        }
    }
    count + processes.found.len()
}
