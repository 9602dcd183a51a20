//! VMCOREINFO: the kernel's own note for those who read its memory from outside.
//!
//! Since 2.6.24 a kernel that can be dumped keeps one page of `KEY=value` lines: its release, where KASLR put it
//! (`KERNELOFFSET`), `phys_base`, the address of its page tables, and from 6.0 on where its symbol table is
//! ("vmcoreinfo: include kallsyms symbols"). The page is its own allocation, so it begins on a page boundary; a scan
//! of the first bytes of each page finds it, without a symbol file and without the guest's help.

use crate::error::{Error, Result};
use crate::memory::PhysicalMemory;

const PAGE: usize = 4096;
const FIRST_LINE: &[u8] = b"OSRELEASE=";

/// The parsed page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vmcoreinfo {
    text: String,
    /// The physical address of the page; nothing where it was a note of the file that holds the memory.
    pub physical: Option<u64>,
}

impl Vmcoreinfo {
    /// The note that was dumped beside `memory`, and all pages of `memory` that look like one, by ascending address; usually
    /// there is exactly one.
    ///
    /// Anyone in the guest can write such a page. Which one is the kernel's own, only the kernel's data can tell: see
    /// [`Kernel::open`](crate::Kernel::open).
    pub fn scan(memory: &dyn PhysicalMemory) -> Vec<Self> {
        let mut found: Vec<Self> =
            memory.vmcoreinfo().and_then(|note| Self::parse(note, None)).into_iter().collect();
        for segment in memory.segments() {
            let mut physical = segment.physical.next_multiple_of(PAGE as u64);
            let end = segment.physical + segment.length;
            while physical.checked_add(PAGE as u64).is_some_and(|next| next <= end) {
                let mut start = [0; FIRST_LINE.len()];
                if memory.read(physical, &mut start).is_ok() && start == *FIRST_LINE {
                    let mut page = vec![0; PAGE];
                    if memory.read(physical, &mut page).is_ok() {
                        found.extend(Self::parse(&page, Some(physical)));
                    }
                }
                physical += PAGE as u64;
            }
        }
        found
    }

    /// A page's text, if it is one: printable lines up to the first zero byte.
    pub(crate) fn parse(page: &[u8], physical: Option<u64>) -> Option<Self> {
        let length = page.iter().position(|&byte| byte == 0).unwrap_or(page.len());
        let text = std::str::from_utf8(&page[..length]).ok()?;
        let plain = |c: char| c == '\n' || (!c.is_control() && c.is_ascii());
        (text.chars().all(plain) && text.contains("SYMBOL("))
            .then(|| Self { text: text.to_owned(), physical })
    }

    /// Returns the value behind `KEY=`.
    #[must_use]
    pub fn value(&self, key: &str) -> Option<&str> {
        self.text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
    }

    /// The kernel's release, as `uname -r` says it.
    #[must_use]
    pub fn release(&self) -> &str {
        self.value("OSRELEASE").unwrap_or("")
    }

    /// The time of the panic, in seconds since 1970; absent while the kernel lives.
    #[must_use]
    pub fn crash_time(&self) -> Option<u64> {
        self.value("CRASHTIME")?.parse().ok()
    }

    /// Returns the address of a symbol listed here.
    pub(crate) fn symbol(&self, key: &'static str) -> Result<u64> {
        let value = self.value(key).and_then(|value| u64::from_str_radix(value, 16).ok());
        value.ok_or(Error::NoFact { key })
    }

    /// Returns a number listed here in decimal, as `NUMBER(...)` are. Negative ones are given as two's complement.
    pub(crate) fn number(&self, key: &'static str) -> Result<u64> {
        let parse = |value: &str| value.parse().ok().or_else(|| value.parse().ok().map(i64::cast_unsigned));
        self.value(key).and_then(parse).ok_or(Error::NoFact { key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_their_whole_key() {
        let page =
            b"OSRELEASE=6.1\nSYMBOL(_stext)=ffffffff81000000\nNUMBER(phys_base)=-16777216\nCRASHTIME=17\n\0x";
        let info = Vmcoreinfo::parse(page, Some(0x1000)).unwrap();
        assert_eq!(info.release(), "6.1");
        assert_eq!(info.symbol("SYMBOL(_stext)").unwrap(), 0xffff_ffff_8100_0000);
        assert_eq!(info.number("NUMBER(phys_base)").unwrap().cast_signed(), -16_777_216);
        assert_eq!(info.crash_time(), Some(17));
        assert!(matches!(info.symbol("SYMBOL(_ste)"), Err(Error::NoFact { key: "SYMBOL(_ste)" })));
    }

    #[test]
    fn pages_of_something_else_are_passed_over() {
        assert_eq!(Vmcoreinfo::parse(b"OSRELEASE=6.1\nSYMBOL(\xff)\n\0", None), None);
        assert_eq!(Vmcoreinfo::parse(b"OSRELEASE=6.1\n\0", None), None);
        assert_eq!(Vmcoreinfo::parse(b"OSRELEASE=6.1\nSYMBOL(\x07)\n\0", None), None);
    }
}
