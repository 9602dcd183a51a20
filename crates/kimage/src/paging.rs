//! x86-64 page tables: from a virtual to a physical address, in the dead kernel's address space or a process'.
//!
//! Four levels of 512 entries (five with LA57), each entry a physical address and flags. An entry above the lowest
//! level with the page-size bit maps 2 MiB or 1 GiB at once. An entry that is not present may still tell something:
//! a page in swap, one being moved, or one that `PROT_NONE` hides.
//! Source: Intel SDM volume 3, chapter 4; Linux `arch/x86/include/asm/pgtable*.h`.

use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::memory::PhysicalMemory;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const DIRTY: u64 = 1 << 6;
const HUGE: u64 = 1 << 7;
/// `_PAGE_GLOBAL`, which Linux gives this meaning where PRESENT is clear.
const PROT_NONE: u64 = 1 << 8;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const ENTRIES: u64 = 512;

/// A page that a process has in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The first virtual address.
    pub address: u64,
    /// Where it is in physical memory.
    pub physical: u64,
    /// 4 KiB, 2 MiB or 1 GiB.
    pub size: u64,
    /// Whether the processor has seen a write through this entry.
    pub dirty: bool,
    /// Whether writing through this entry is allowed.
    pub writable: bool,
}

/// What stands in a page table's lowest entry for an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A page in memory.
    Page(Leaf),
    /// Not in memory, but not nothing: in swap, or being migrated. The raw entry.
    Swap {
        /// The virtual address.
        address: u64,
        /// The entry as it stands.
        raw: u64,
    },
}

/// The tables of one address space.
#[derive(Clone, Copy)]
pub struct PageTables<'m> {
    memory: &'m dyn PhysicalMemory,
    root: u64,
    levels: u8,
}

/// Returns how many bytes an entry of `level` spans; level 1 is the lowest.
const fn span(level: u8) -> u64 {
    1 << (12 + 9 * (level - 1))
}

impl<'m> PageTables<'m> {
    /// Tables whose root is at physical address `root`; `levels` is 4 or 5.
    pub fn new(memory: &'m dyn PhysicalMemory, root: u64, levels: u8) -> Self {
        Self { memory, root: root & ADDRESS, levels: levels.clamp(4, 5) }
    }

    fn entry(&self, table: u64, index: u64) -> Result<u64> {
        let mut bytes = [0; 8];
        self.memory.read(table + index * 8, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Returns where `address` is in physical memory.
    ///
    /// # Errors
    ///
    /// [`Error::NotMapped`] where it is not there, [`Error::NoMemory`] where a table is outside the memory.
    pub fn physical(&self, address: u64) -> Result<u64> {
        let mut table = self.root;
        let mut level = self.levels;
        loop {
            let entry = self.entry(table, (address / span(level)) % ENTRIES)?;
            match self.decode(address & !(span(level) - 1), entry, level) {
                Decoded::Table(next) => {
                    table = next;
                    level -= 1;
                }
                Decoded::Entry(Entry::Page(leaf)) => return Ok(leaf.physical + (address - leaf.address)),
                Decoded::Entry(Entry::Swap { .. }) | Decoded::Nothing => {
                    return Err(Error::NotMapped { address, level });
                }
            }
        }
    }

    /// Calls `visit` with every entry of `start..end` that is not empty, by ascending address. A table or a page that
    /// is outside the memory, or a table that occurs twice, is reported through `problem` with the range that it
    /// would have mapped, and passed over.
    pub fn walk(
        &self,
        start: u64,
        end: u64,
        visit: &mut dyn FnMut(Entry),
        problem: &mut dyn FnMut(u64, u64, Error),
    ) {
        Walker { tables: self, seen: HashSet::new(), visit, problem }.table(
            self.root,
            self.levels,
            start,
            end,
        );
    }

    /// Returns whether all of a page is memory.
    fn holds(&self, leaf: &Leaf) -> bool {
        let segments = self.memory.segments();
        let index = segments.partition_point(|segment| segment.physical <= leaf.physical);
        index.checked_sub(1).map(|index| segments[index]).is_some_and(|segment| {
            let within = leaf.physical - segment.physical;
            within < segment.length && leaf.size <= segment.length - within
        })
    }

    fn decode(&self, address: u64, entry: u64, level: u8) -> Decoded {
        if entry & PRESENT == 0 {
            // Linux inverts the address bits of PROT_NONE entries against L1TF (`protnone_mask`).
            let hidden = entry & PROT_NONE != 0 && (level == 1 || entry & HUGE != 0);
            return match (entry, level) {
                (0, _) => Decoded::Nothing,
                _ if hidden => Decoded::Entry(Entry::Page(leaf(address, !entry & ADDRESS, entry, level))),
                (raw, 1 | 2) => Decoded::Entry(Entry::Swap { address, raw }),
                _ => Decoded::Nothing,
            };
        }
        if level == 1 || (level <= 3 && entry & HUGE != 0) {
            return Decoded::Entry(Entry::Page(leaf(address, entry & ADDRESS, entry, level)));
        }
        Decoded::Table(entry & ADDRESS)
    }
}

/// A walk through the tables of a range. Tables that contain themselves would go on for 2^36 entries: none of a
/// process' tables has two places, so that each is read once.
struct Walker<'w, 'm> {
    tables: &'w PageTables<'m>,
    seen: HashSet<u64>,
    visit: &'w mut dyn FnMut(Entry),
    problem: &'w mut dyn FnMut(u64, u64, Error),
}

impl Walker<'_, '_> {
    fn table(&mut self, table: u64, level: u8, start: u64, end: u64) {
        if !self.seen.insert(table) {
            let why = "it occurs twice in one address space".to_owned();
            return (self.problem)(start, end, Error::Corrupt { kind: "page table", address: table, why });
        }
        let span = span(level);
        let mut address = start;
        // One read for the table, not one per entry: memory behind a device is slow to ask.
        let mut bytes = [0; 4096];
        if let Err(error) = self.tables.memory.read(table, &mut bytes) {
            return (self.problem)(start, end, error);
        }
        while address < end {
            let from = address & !(span - 1);
            let next = from.saturating_add(span).min(end);
            let index = usize::try_from((address / span) % ENTRIES).unwrap_or(0) * 8;
            let mut entry = [0; 8];
            entry.copy_from_slice(&bytes[index..index + 8]);
            match self.tables.decode(from, u64::from_le_bytes(entry), level) {
                Decoded::Nothing => {}
                Decoded::Entry(Entry::Page(leaf)) if !self.tables.holds(&leaf) => {
                    (self.problem)(address, next, Error::NoMemory { physical: leaf.physical });
                }
                Decoded::Entry(entry) => (self.visit)(entry),
                Decoded::Table(lower) => self.table(lower, level - 1, address, next),
            }
            address = next;
        }
    }
}

enum Decoded {
    Nothing,
    Entry(Entry),
    Table(u64),
}

fn leaf(address: u64, physical: u64, entry: u64, level: u8) -> Leaf {
    let size = span(level);
    Leaf {
        address,
        // Bit 12 of a huge page's entry is a flag (PAT), not part of the address.
        physical: physical & !(size - 1),
        size,
        dirty: entry & DIRTY != 0,
        writable: entry & WRITABLE != 0,
    }
}
