//! A kernel found in memory: its facts, symbols and types, and its address space.
//!
//! An image explains itself. VMCOREINFO is found by its first line; it says where the kernel's text is and where
//! the symbol table is; two symbols bound the BTF; BTF places all members. Three windows of the kernel's address space
//! then need no tables: the text mapping (`phys_base`), and the direct mapping of all memory (`page_offset_base`);
//! what is left (stacks, modules, vmalloc) is walked through the kernel's page tables.

use crate::error::{Error, Result};
use crate::kallsyms::{Symbols, Tables};
use crate::memory::PhysicalMemory;
use crate::object::Object;
use crate::paging::PageTables;
use crate::types::Types;
use crate::vmcoreinfo::Vmcoreinfo;

/// Where x86-64 maps the kernel's text, before KASLR moves it within the window.
const TEXT: u64 = 0xffff_ffff_8000_0000;
const TEXT_WINDOW: u64 = 1 << 30;
/// The lowest address that can be the kernel's, with five levels of tables.
const LOWEST: u64 = 0xff00_0000_0000_0000;
/// Where the direct mapping is without KASLR (`__PAGE_OFFSET_BASE_L4`).
const DIRECT: u64 = 0xffff_8880_0000_0000;
/// The most symbols, and bytes of names, that a kernel is believed to have.
const MOST_SYMBOLS: u64 = 4_000_000;
const MOST_BTF: u64 = 256 << 20;

/// A Linux kernel in a machine's memory, dead or alive.
pub struct Kernel {
    memory: Box<dyn PhysicalMemory>,
    info: Vmcoreinfo,
    symbols: Symbols,
    types: Types,
    windows: Windows,
}

/// The parts of the address space that are linear.
#[derive(Clone, Copy)]
pub(crate) struct Windows {
    /// `phys_base`: what to add to an offset into the text mapping.
    pub(crate) phys_base: u64,
    /// Where all memory is mapped; not known until it has been read through the text mapping.
    pub(crate) direct: Option<u64>,
    /// The physical address of the kernel's own page tables.
    pub(crate) tables: u64,
    /// The number of levels of page tables, 4 or 5.
    pub(crate) levels: u8,
}

impl Kernel {
    /// Finds the kernel in `memory`.
    ///
    /// # Errors
    ///
    /// [`Error::NoKernel`] where there is none; otherwise what the first candidate lacked.
    pub fn open(memory: Box<dyn PhysicalMemory>) -> Result<Self> {
        let mut first = None;
        for info in Vmcoreinfo::scan(&*memory) {
            match examine(&*memory, &info) {
                Ok((symbols, types, windows)) => return Ok(Self { memory, info, symbols, types, windows }),
                Err(error) => first = first.or(Some(error)),
            }
        }
        Err(first.unwrap_or(Error::NoKernel))
    }

    /// A kernel whose facts are known already: for images made by hand.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(crate) fn assemble(
        memory: Box<dyn PhysicalMemory>,
        info: Vmcoreinfo,
        symbols: Symbols,
        types: Types,
        windows: Windows,
    ) -> Self {
        Self { memory, info, symbols, types, windows }
    }

    /// Returns the machine's memory.
    #[must_use]
    pub fn memory(&self) -> &dyn PhysicalMemory {
        &*self.memory
    }

    /// Returns what the kernel says about itself.
    #[must_use]
    pub fn info(&self) -> &Vmcoreinfo {
        &self.info
    }

    /// Returns the kernel's symbols.
    #[must_use]
    pub fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// Returns the kernel's types.
    #[must_use]
    pub fn types(&self) -> &Types {
        &self.types
    }

    /// Returns how many levels its page tables have.
    #[must_use]
    pub fn levels(&self) -> u8 {
        self.windows.levels
    }

    /// Returns the structure `kind` at `address`.
    ///
    /// # Errors
    ///
    /// [`Error::BadPointer`] where no structure of the kernel can be there.
    pub fn object(&self, kind: &'static str, address: u64) -> Result<Object<'_>> {
        if !(LOWEST..=u64::MAX - 4096).contains(&address) {
            return Err(Error::BadPointer { address, kind });
        }
        Ok(Object::new(self, kind, address))
    }

    /// The structure `kind` that is the variable `symbol`.
    ///
    /// # Errors
    ///
    /// [`Error::NoSymbol`], [`Error::BadPointer`].
    pub fn variable(&self, symbol: &str, kind: &'static str) -> Result<Object<'_>> {
        self.object(kind, self.symbols.address(symbol)?)
    }

    /// Reads from the kernel's address space.
    ///
    /// # Errors
    ///
    /// [`Error::NotMapped`], [`Error::NoMemory`], [`Error::BadPointer`].
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<()> {
        self.windows.read(&*self.memory, address, into)
    }

    /// Returns a number of eight bytes in the kernel's address space.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn read_u64(&self, address: u64) -> Result<u64> {
        self.windows.read_u64(&*self.memory, address)
    }

    /// Returns where an address of the kernel is in physical memory.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read).
    pub fn physical(&self, address: u64) -> Result<u64> {
        self.windows.physical(&*self.memory, address)
    }

    /// Returns where the kernel sees a physical address in its direct mapping.
    #[must_use]
    pub fn direct(&self, physical: u64) -> u64 {
        self.windows.direct.unwrap_or(DIRECT).wrapping_add(physical)
    }
}

impl Windows {
    fn physical(&self, memory: &dyn PhysicalMemory, address: u64) -> Result<u64> {
        if (TEXT..TEXT + TEXT_WINDOW).contains(&address) {
            return Ok((address - TEXT).wrapping_add(self.phys_base));
        }
        if address < LOWEST {
            return Err(Error::BadPointer { address, kind: "kernel structure" });
        }
        if let Some(direct) = self.direct
            && let Some(physical) = address.checked_sub(direct)
        {
            let last = memory.segments().last();
            if last.is_some_and(|segment| physical < segment.physical + segment.length) {
                return Ok(physical);
            }
        }
        PageTables::new(memory, self.tables, self.levels).physical(address)
    }

    fn read(&self, memory: &dyn PhysicalMemory, address: u64, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            let at = address
                .checked_add(done as u64)
                .ok_or(Error::BadPointer { address, kind: "kernel structure" })?;
            let physical = self.physical(memory, at)?;
            let count = usize::try_from(4096 - at % 4096).unwrap_or(1).min(into.len() - done);
            memory.read(physical, &mut into[done..done + count])?;
            done += count;
        }
        Ok(())
    }

    fn read_u64(&self, memory: &dyn PhysicalMemory, address: u64) -> Result<u64> {
        let mut bytes = [0; 8];
        self.read(memory, address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Up to `length` bytes; fewer where the mapping ends.
    fn read_up_to(&self, memory: &dyn PhysicalMemory, address: u64, length: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut page = [0; 4096];
        while (bytes.len() as u64) < length {
            let at = address.wrapping_add(bytes.len() as u64);
            let count = usize::try_from((4096 - at % 4096).min(length - bytes.len() as u64)).unwrap_or(1);
            if self.read(memory, at, &mut page[..count]).is_err() {
                break;
            }
            bytes.extend_from_slice(&page[..count]);
        }
        bytes
    }
}

/// Follows a candidate from its note to its types; what holds together all the way is the kernel.
fn examine(memory: &dyn PhysicalMemory, info: &Vmcoreinfo) -> Result<(Symbols, Types, Windows)> {
    let phys_base = info.number("NUMBER(phys_base)")?;
    let levels =
        if info.number("NUMBER(pgtable_l5_enabled)").is_ok_and(|enabled| enabled != 0) { 5 } else { 4 };
    let tables = info.symbol("SYMBOL(init_top_pgt)").or_else(|_| info.symbol("SYMBOL(swapper_pg_dir)"))?;
    let mut windows = Windows { phys_base, direct: None, tables: 0, levels };
    windows.tables = windows.physical(memory, tables)?;
    let symbols = symbols(memory, info, &windows)?;
    windows.direct = Some(match symbols.get("page_offset_base") {
        Some(address) => windows.read_u64(memory, address)?,
        None => DIRECT,
    });
    // The note's own variable must lead back to the page the note was read from: a copy in a file does not. A note of the dump
    // was chosen by who dumped it.
    if let (Some(address), Some(variable)) = (info.physical, symbols.get("vmcoreinfo_data")) {
        let page = windows.read_u64(memory, variable)?;
        let physical = windows.physical(memory, page)?;
        if physical != address {
            let why = format!("the kernel's own is at {physical:#x}");
            return Err(Error::Corrupt { kind: "VMCOREINFO", address, why });
        }
    }
    let (start, stop) = (symbols.address("__start_BTF"), symbols.address("__stop_BTF"));
    let (Ok(start), Ok(stop)) = (start, stop) else {
        return Err(Error::NoTypes("it has no symbol __start_BTF".to_owned()));
    };
    let length = stop.checked_sub(start).filter(|length| *length <= MOST_BTF);
    let length = length.ok_or_else(|| Error::NoTypes(format!("they lie from {start:#x} to {stop:#x}")))?;
    let btf = windows.read_up_to(memory, start, length);
    Ok((symbols, Types::from_btf(&btf)?, windows))
}

/// Reads the symbol table that the note points to.
fn symbols(memory: &dyn PhysicalMemory, info: &Vmcoreinfo, windows: &Windows) -> Result<Symbols> {
    let number = |key| windows.read_u64(memory, info.symbol(key)?);
    let count = number("SYMBOL(kallsyms_num_syms)")? & 0xffff_ffff;
    if count == 0 || count > MOST_SYMBOLS {
        let why = format!("it would have {count} symbols");
        let address = info.symbol("SYMBOL(kallsyms_num_syms)")?;
        return Err(Error::Corrupt { kind: "kallsyms table", address, why });
    }
    let index = windows.read_up_to(memory, info.symbol("SYMBOL(kallsyms_token_index)")?, 512);
    let offsets = windows.read_up_to(memory, info.symbol("SYMBOL(kallsyms_offsets)")?, count * 4);
    let tables = Tables {
        // A name takes 12 bytes on average; 40 each is more than there can be.
        names: windows.read_up_to(memory, info.symbol("SYMBOL(kallsyms_names)")?, count * 40),
        tokens: windows.read_up_to(memory, info.symbol("SYMBOL(kallsyms_token_table)")?, 1 << 16),
        token_index: index.chunks_exact(2).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]])).collect(),
        offsets: offsets
            .chunks_exact(4)
            .map(|bytes| i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            .collect(),
        base: number("SYMBOL(kallsyms_relative_base)")?,
    };
    Symbols::parse(&tables)
}
