//! The mappings of a process, from either tree that kernels keep them in.
//!
//! Since 6.1 that is a maple tree: nodes of up to 16 slots whose pivots are the last addresses of the slots; a slot
//! holds a child or, in a leaf, the mapping. The lower bits of a child's pointer are its type. Before 6.1 the mappings
//! are a linked list. Source: Linux `include/linux/maple_tree.h`, `lib/maple_tree.c`.

use std::collections::HashSet;

use crate::error::{Error, Result, Walk};
use crate::kernel::Kernel;
use crate::object::Object;
use crate::paging::{Entry, PageTables};
use crate::task::Task;

/// A process cannot have more mappings than this, whatever `vm.max_map_count` says.
const MOST: usize = 1 << 20;
/// A tree of 16 slots a node that deep would hold more than can be addressed.
const DEEPEST: u32 = 16;
const READ: u64 = 1;
const WRITE: u64 = 2;
const EXECUTE: u64 = 4;
const SHARED: u64 = 8;
/// The user's half of the address space ends here, with five levels of tables.
const USER_END: u64 = 1 << 56;

/// A process' address space.
#[derive(Clone, Copy, Debug)]
pub struct AddressSpace<'k> {
    object: Object<'k>,
}

/// One mapping.
#[derive(Clone, Copy, Debug)]
pub struct Mapping<'k> {
    object: Object<'k>,
    /// The lowest address of the mapping.
    pub start: u64,
    /// The address after its last.
    pub end: u64,
    /// `vm_flags`, as `include/linux/mm.h` lists them.
    pub flags: u64,
    /// Where in the file it begins, in pages.
    pub page_offset: u64,
}

impl<'k> Task<'k> {
    /// Returns its address space; nothing for kernel threads and zombies.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn address_space(&self) -> Result<Option<AddressSpace<'k>>> {
        Ok(self.object().pointer("mm", "mm_struct")?.map(|object| AddressSpace { object }))
    }
}

impl<'k> AddressSpace<'k> {
    /// Returns its `mm_struct`.
    #[must_use]
    pub fn object(&self) -> Object<'k> {
        self.object
    }

    /// Returns the page tables of the address space.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn tables(&self) -> Result<PageTables<'k>> {
        let kernel = self.object.kernel();
        let root = kernel.physical(self.object.required("pgd", "pgd_t")?.address())?;
        Ok(PageTables::new(kernel.memory(), root, kernel.levels()))
    }

    /// Returns all mappings, by ascending address.
    pub fn mappings(&self) -> Walk<Mapping<'k>> {
        let mut walk = Walk::default();
        let mut addresses = Vec::new();
        if self.object.has("mm_mt") {
            match self.object.embedded("mm_mt", "maple_tree").and_then(|tree| tree.u64("ma_root")) {
                Ok(root) => {
                    let mut tree = MapleWalk {
                        kernel: self.object.kernel(),
                        seen: HashSet::new(),
                        found: &mut addresses,
                    };
                    tree.root(root, &mut walk);
                }
                Err(error) => walk.note("the root of the mappings".to_owned(), error),
            }
        } else {
            self.linked(&mut addresses, &mut walk);
        }
        let mut last = 0;
        for address in addresses {
            let mapping = Mapping::check(self, address).and_then(|mapping| {
                if mapping.start < last {
                    return Err(mapping
                        .object
                        .corrupt(format!("it begins at {:#x}, before the last ended", mapping.start)));
                }
                last = mapping.end;
                Ok(mapping)
            });
            walk.take(|| format!("the mapping at {address:#x}"), mapping);
        }
        walk
    }

    /// The list of kernels before 6.1.
    fn linked(&self, addresses: &mut Vec<u64>, walk: &mut Walk<Mapping<'k>>) {
        let mut seen = HashSet::new();
        let mut next = self.object.pointer("mmap", "vm_area_struct");
        loop {
            match next {
                Ok(None) => return,
                Ok(Some(object)) if seen.len() < MOST && seen.insert(object.address()) => {
                    addresses.push(object.address());
                    next = object.pointer("vm_next", "vm_area_struct");
                }
                Ok(Some(object)) => {
                    return walk
                        .note("the list of mappings".to_owned(), object.corrupt("it was there before"));
                }
                Err(error) => return walk.note(format!("the mapping after number {}", seen.len()), error),
            }
        }
    }

    /// Reads a process' memory as the process saw it.
    ///
    /// # Errors
    ///
    /// [`Error::NotMapped`] with the first address that is not in memory, [`Error::NoMemory`].
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        let tables = self.tables()?;
        let mut done = 0;
        while done < into.len() {
            let at = address.checked_add(done as u64).filter(|at| *at < USER_END);
            let at = at.ok_or(Error::NotMapped { address, level: 5 })?;
            let count = usize::try_from(4096 - at % 4096).unwrap_or(1).min(into.len() - done);
            let physical = tables.physical(at)?;
            self.object.kernel().memory().read(physical, &mut into[done..done + count])?;
            done += count;
        }
        Ok(())
    }
}

impl<'k> Mapping<'k> {
    fn check(space: &AddressSpace<'k>, address: u64) -> Result<Self> {
        let object = space.object.kernel().object("vm_area_struct", address)?;
        let mapping = Self {
            object,
            start: object.u64("vm_start")?,
            end: object.u64("vm_end")?,
            flags: object.u64("vm_flags")?,
            page_offset: object.u64("vm_pgoff")?,
        };
        if mapping.start >= mapping.end
            || mapping.end > USER_END
            || !(mapping.start | mapping.end).is_multiple_of(4096)
        {
            return Err(
                object.corrupt(format!("it would go from {:#x} to {:#x}", mapping.start, mapping.end))
            );
        }
        if object.u64("vm_mm")? != space.object.address() {
            return Err(object.corrupt("it belongs to another process"));
        }
        Ok(mapping)
    }

    /// Returns its `vm_area_struct`.
    #[must_use]
    pub fn object(&self) -> Object<'k> {
        self.object
    }

    /// The `struct file` it maps, unless it is anonymous.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn file(&self) -> Result<Option<Object<'k>>> {
        self.object.pointer("vm_file", "file")
    }

    /// `rwxp`, as `/proc/PID/maps` shows it.
    #[must_use]
    pub fn permissions(&self) -> String {
        [(READ, 'r', '-'), (WRITE, 'w', '-'), (EXECUTE, 'x', '-'), (SHARED, 's', 'p')]
            .map(|(bit, yes, no)| if self.flags & bit != 0 { yes } else { no })
            .iter()
            .collect()
    }

    /// Returns what it is for, where that is not a file: `[heap]`, `[stack]`, `[vdso]` and their like.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn label(&self) -> Result<Option<String>> {
        let kernel = self.object.kernel();
        let space = self.object.required("vm_mm", "mm_struct")?;
        let operations = self.object.u64("vm_ops")?;
        if operations != 0 && kernel.symbols().get("special_mapping_vmops") == Some(operations) {
            let special = self.object.required("vm_private_data", "vm_special_mapping")?;
            return Ok(Some(String::from_utf8_lossy(&special.string("name")?).into_owned()));
        }
        let within = |path| -> Result<bool> { Ok((self.start..self.end).contains(&space.u64(path)?)) };
        Ok(if self.file()?.is_some() {
            None
        } else if self.start <= space.u64("brk")?
            && self.end >= space.u64("start_brk")?
            && self.start >= space.u64("end_data")?
        {
            Some("[heap]".to_owned())
        } else if within("start_stack")? {
            Some("[stack]".to_owned())
        } else {
            None
        })
    }

    /// Returns whether writes are seen by others who map the same.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.flags & SHARED != 0
    }

    /// Returns the pages of it that its page tables hold, by ascending address. Page tables that cannot be read are
    /// reported, with the addresses that they would have mapped.
    pub fn pages(&self, tables: &PageTables<'_>) -> Walk<Entry> {
        let mut walk = Walk::default();
        let mut problems = Vec::new();
        tables.walk(self.start, self.end, &mut |entry| walk.found.push(entry), &mut |start, end, error| {
            problems.push((format!("the pages from {start:#x} to {end:#x}"), error))
        });
        for (during, error) in problems {
            walk.note(during, error);
        }
        walk
    }
}

/// A walk down a maple tree that collects the addresses of its mappings.
struct MapleWalk<'k, 'f> {
    kernel: &'k Kernel,
    seen: HashSet<u64>,
    found: &'f mut Vec<u64>,
}

/// `xa_is_internal`, and no small number: a pointer to a node.
fn is_node(entry: u64) -> bool {
    entry & 3 == 2 && entry > 4096
}

impl MapleWalk<'_, '_> {
    /// A tree of one mapping holds it in its root. Small numbers are marks, not mappings.
    fn root<T>(&mut self, entry: u64, walk: &mut Walk<T>) {
        if is_node(entry) {
            self.child(entry, DEEPEST, walk);
        } else if entry > 4096 {
            self.found.push(entry);
        }
    }

    fn child<T>(&mut self, entry: u64, deeper: u32, walk: &mut Walk<T>) {
        let result = self.node(entry, deeper, walk);
        if let Err(error) = result {
            walk.note(format!("the node of mappings at {:#x}", entry & !0xff), error);
        }
    }

    fn node<T>(&mut self, entry: u64, deeper: u32, walk: &mut Walk<T>) -> Result<()> {
        let address = entry & !0xff;
        let (kind, is_leaf) = match (entry >> 3) & 0xf {
            1 => ("maple_range_64", true),
            2 => ("maple_range_64", false),
            3 => ("maple_arange_64", false),
            other => {
                let why = format!("its type would be {other}");
                return Err(Error::Corrupt { kind: "maple_node", address, why });
            }
        };
        let node = self.kernel.object(kind, address)?;
        if deeper == 0 || self.seen.len() > MOST {
            return Err(node.corrupt("the tree is too deep"));
        }
        if !self.seen.insert(address) {
            return Err(node.corrupt("it is its own descendant"));
        }
        let (pivots, slots) = (node.bytes("pivot")?, node.bytes("slot")?);
        let number = |bytes: &[u8], index: usize| {
            bytes.get(index * 8..index * 8 + 8)?.try_into().ok().map(u64::from_le_bytes)
        };
        for index in 0..slots.len() / 8 {
            let slot = number(&slots, index).unwrap_or(0);
            let pivot = number(&pivots, index);
            // The last slot in use has no pivot of its own, or a zero where there is room for one.
            let is_last = pivot.is_none_or(|pivot| pivot == 0 && index > 0);
            if slot != 0 {
                if is_leaf {
                    if slot > 4096 {
                        self.found.push(slot);
                    }
                } else {
                    // A child that cannot be read costs its own mappings only.
                    self.child(slot, deeper - 1, walk);
                }
            }
            if is_last || pivot == Some(u64::MAX) {
                break;
            }
        }
        Ok(())
    }
}
