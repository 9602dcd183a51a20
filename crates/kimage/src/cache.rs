//! The page cache: which pages of a file are in memory, and which of them the disk does not have yet.
//!
//! A file's pages hang in a radix tree (the kernel calls it an xarray): nodes of 64 slots, each with three marks: *dirty*,
//! *under writeback* and *to be written*. A mark on a slot says that somewhere below there is such a page, so that
//! finding the few unwritten pages of a large file touches few nodes. A page of a file whose blocks are smaller
//! than pages is valid block by block: its *buffers* know. Source: Linux `lib/xarray.c`, `fs/buffer.c`.

use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::object::Object;

const PAGE: u64 = 4096;
const SLOTS: usize = 64;
/// More nodes than a file of 16 TiB has.
const MOST_NODES: usize = 1 << 22;
/// Small internal entries (siblings of a large page, retries) are no nodes.
const LOWEST_NODE: u64 = 4096;

/// A page of a file, or of a disk, in memory.
#[derive(Clone, Copy, Debug)]
pub struct CachedPage<'k> {
    head: Object<'k>,
    /// Which page of the file.
    pub index: u64,
    /// Where it is in physical memory.
    pub physical: u64,
    /// Whether the disk may not have it: dirty, or its writing had not been seen to end.
    pub unwritten: bool,
}

/// A disk block within a cached page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// The block's number on its disk, if it has been given one.
    pub block: u64,
    /// Where in the kernel's address space its bytes are.
    pub data: u64,
    /// The number of bytes.
    pub size: u64,
    /// Whether these bytes are the file's; otherwise nobody has read them yet.
    pub valid: bool,
}

/// Which pages are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// All that are in memory.
    All,
    /// Those that the disk may not have.
    Unwritten,
}

impl Kernel {
    /// Returns the pages of an `address_space`, by ascending index.
    ///
    /// # Errors
    ///
    /// Those of reading; a tree that contradicts itself is corrupt.
    pub fn cached_pages<'k>(&'k self, mapping: Object<'k>, which: Pages) -> Result<Vec<CachedPage<'k>>> {
        let root = mapping.u64("i_pages.xa_head")?;
        let mut walk = Walker { kernel: self, which, seen: HashSet::new(), found: Vec::new() };
        if is_node(root) {
            walk.node(root - 2, 0, None)?;
        } else if root & 3 == 0 && root != 0 {
            // A file of one page has it in the root, whose marks nobody needs: one page more does no harm.
            walk.found.push(walk.page(root, 0, true)?);
        }
        Ok(walk.found)
    }

    /// Returns whether a flag of `enum pageflags` is set in a page's first word.
    fn page_flag(&self, page: Object<'_>, name: &str, fallback: u64) -> Result<bool> {
        let bit = self.types().constant("pageflags", name).unwrap_or(fallback).min(63);
        Ok(page.u64("flags")? >> bit & 1 != 0)
    }
}

fn is_node(entry: u64) -> bool {
    entry & 3 == 2 && entry > LOWEST_NODE
}

struct Walker<'k> {
    kernel: &'k Kernel,
    which: Pages,
    seen: HashSet<u64>,
    found: Vec<CachedPage<'k>>,
}

impl<'k> Walker<'k> {
    /// Walks a node whose first slot stands for page `base`; `parent` is the shift of the node above.
    fn node(&mut self, address: u64, base: u64, parent: Option<u64>) -> Result<()> {
        let node = self.kernel.object("xa_node", address)?;
        let shift = node.u64("shift")?;
        if shift % 6 != 0 || shift > 60 || parent.is_some_and(|parent| parent != shift + 6) {
            return Err(node.corrupt(format!("its shift would be {shift}")));
        }
        if !self.seen.insert(address) || self.seen.len() > MOST_NODES {
            return Err(node.corrupt("it occurs twice"));
        }
        let (slots, marks) = (node.bytes("slots")?, node.bytes("marks")?);
        let words = |bytes: &[u8]| -> Vec<u64> {
            bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes)).collect()
        };
        let (slots, marked) = (words(&slots), words(&marks).into_iter().fold(0, |all, mark| all | mark));
        let mut last = 0;
        for (slot, &entry) in (0_u64..).zip(slots.iter().take(SLOTS)) {
            // A sibling stands for the same large page as the slot that it names.
            let sibling = entry & 3 == 2 && entry < LOWEST_NODE && entry >> 2 < SLOTS as u64;
            let entry = if sibling { last } else { entry };
            last = entry;
            let unwritten = marked >> slot & 1 != 0;
            if entry == 0 || entry & 1 != 0 || (self.which == Pages::Unwritten && !unwritten) {
                // Nothing, or a note of what was there once.
                continue;
            }
            let index = base
                .checked_add(slot << shift)
                .ok_or_else(|| node.corrupt("it is beyond the end of any file"))?;
            if is_node(entry) {
                self.node(entry - 2, index, Some(shift))?;
            } else if entry & 3 == 0 {
                for step in 0..1_u64 << shift.min(9) {
                    self.found.push(self.page(entry, index + step, unwritten)?);
                }
            }
        }
        Ok(())
    }

    fn page(&self, address: u64, index: u64, unwritten: bool) -> Result<CachedPage<'k>> {
        let head = self.kernel.object("page", address)?;
        // A large page stands in several slots: its own index tells which part is meant.
        let first = head.u64(if head.has("index") { "index" } else { "__folio_index" })?;
        let within = index.checked_sub(first).filter(|within| *within < 1 << 18);
        let within = within.ok_or_else(|| head.corrupt(format!("page {first} stands in slot {index}")))?;
        let physical = self.kernel.page_physical(address)?.wrapping_add(within * PAGE);
        Ok(CachedPage { head, index, physical, unwritten })
    }
}

impl<'k> CachedPage<'k> {
    /// The kernel whose memory it is in.
    #[must_use]
    pub fn kernel(&self) -> &'k Kernel {
        self.head.kernel()
    }

    /// Returns whether all of it is the file's. Where not, its [`buffers`](Self::buffers) say which parts are.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn is_valid(&self) -> Result<bool> {
        self.head.kernel().page_flag(self.head, "PG_uptodate", 2)
    }

    /// The disk blocks in it, in order; none where the kernel has not cut it up.
    ///
    /// # Errors
    ///
    /// Those of reading; a ring of buffers that does not close is corrupt.
    pub fn buffers(&self) -> Result<Vec<Buffer>> {
        let kernel = self.head.kernel();
        if !kernel.page_flag(self.head, "PG_private", 13)? {
            return Ok(Vec::new());
        }
        let first = self.head.required("private", "buffer_head")?;
        let mut found = Vec::new();
        let mut at = first;
        // No block is smaller than a sector.
        for _ in 0..PAGE / 512 {
            let size = at.u64("b_size")?;
            if !(512..=PAGE).contains(&size) {
                return Err(at.corrupt(format!("a block of {size} bytes")));
            }
            found.push(Buffer {
                block: at.u64("b_blocknr")?,
                data: at.u64("b_data")?,
                size,
                valid: at.u64("b_state")? & 1 != 0,
            });
            at = at.required("b_this_page", "buffer_head")?;
            if at.address() == first.address() {
                return Ok(found);
            }
        }
        Err(Error::Corrupt {
            kind: "buffer_head",
            address: first.address(),
            why: "its ring never closes".to_owned(),
        })
    }
}
