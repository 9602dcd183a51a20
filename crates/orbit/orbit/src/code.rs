//! Where the program's code is: the mappings from which a function may be called in an orbit.
//!
//! An orbit has the code that main had when the orbit was created, at the same addresses. What main loads later is not
//! there, so the table is read once, at creation.

use orrery_sys::PageRange;
use orrery_sys::maps::{Access, Maps};

/// Executable mappings, in address order.
#[derive(Debug, Default)]
pub(crate) struct Code(Vec<PageRange>);

impl Code {
    /// Returns those of the calling process.
    pub(crate) fn of_this_process() -> orrery_sys::Result<Self> {
        let mut ranges: Vec<PageRange> = Vec::new();
        Maps::open()?.for_each(&mut vec![0; 64 << 10], |line| {
            if line.access.contains(Access::EXECUTE) && line.name != b"[vsyscall]" {
                match ranges.last_mut() {
                    Some(last) if last.end == line.range.start => last.end = line.range.end,
                    _ => ranges.push(line.range),
                }
            }
            Ok(())
        })?;
        Ok(Self(ranges))
    }

    /// Returns whether there is code at `address`.
    pub(crate) fn contains(&self, address: usize) -> bool {
        let after = self.0.partition_point(|range| range.start <= address);
        after > 0 && self.0[after - 1].contains(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_code_and_data_is_not() {
        let code = Code::of_this_process().unwrap();
        assert!(code.contains(Code::of_this_process as *const () as usize));
        assert!(code.contains(libc::getpid as *const () as usize));
        let local = 0_u8;
        for address in [0, 8, core::ptr::from_ref(&local).addr(), usize::MAX] {
            assert!(!code.contains(address));
        }
    }
}
