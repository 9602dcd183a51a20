//! In main: what tasks touched that was not passed, in the checking mode ([`crate::check`]).

use core::fmt;
use std::collections::HashSet;

use orrery_memory::area::{Area, AreaArena, Freed};
use orrery_sys::process_memory;

use crate::check::Noted;
use crate::symbol::{self, Place};

/// How many findings are kept.
const MOST: usize = 1000;

/// Why a task should not have touched memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// It is in an area that the call did not name: the orbit has it as of an earlier call, or not at all.
    NotPassed,
    /// Main had freed it before the call.
    Freed,
    /// It is outside of areas, and main has changed it since the orbit's creation.
    Stale,
}

/// Something that a task touched and that was not passed to it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// The number of the call.
    pub call: u64,
    /// The address.
    pub address: usize,
    /// What is wrong with it.
    pub reason: Reason,
    /// The area, symbol or mapping that it is in.
    pub place: String,
    /// The size of that in bytes.
    pub bytes: usize,
    /// Module, offset and symbol of the instruction.
    pub code: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { call, address, place, bytes, code, .. } = self;
        let reason = match self.reason {
            Reason::NotPassed => "was not passed: the call does not name the area",
            Reason::Freed => "was freed before the call",
            Reason::Stale => "is stale: main has changed it since the orbit was created",
        };
        write!(
            f,
            "the task of call {call} touched {address:#x} ({place}, {bytes} bytes), which {reason}; in {code}"
        )
    }
}

/// What a call passed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Passed {
    /// Where the areas start that the call names.
    pub(crate) areas: Vec<usize>,
    /// How many blocks had been freed.
    pub(crate) frees: u64,
}

impl Passed {
    pub(crate) fn now(areas: &[&Area]) -> Self {
        Self { areas: areas.iter().map(|area| area.base()).collect(), frees: orrery_memory::area::frees() }
    }
}

/// All findings of one orbit.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    list: Vec<Finding>,
    known: HashSet<(usize, usize, Reason)>,
}

impl Findings {
    pub(crate) fn list(&self) -> &[Finding] {
        &self.list
    }

    /// Judges what the task of a call touched. What is new is written to standard error, too.
    pub(crate) fn judge(&mut self, orbit: &str, call: u64, passed: &Passed, noted: &[Noted]) {
        for noted in noted {
            let Some((reason, known)) = reason(passed, noted) else { continue };
            let key = (noted.address & !7, noted.instruction, reason);
            if self.list.len() >= MOST || !self.known.insert(key) {
                continue;
            }
            let Place { name, bytes } = known.unwrap_or_else(|| symbol::place(noted.address));
            let code = symbol::of_code(noted.instruction);
            let code = code.unwrap_or_else(|| format!("instruction {:#x}", noted.instruction));
            let finding = Finding { call, address: noted.address, reason, place: name, bytes, code };
            eprintln!("orrery: orbit {orbit}: {finding}");
            self.list.push(finding);
        }
    }
}

/// Returns what is wrong with an access, if anything, and where it went, if that is known better than by mappings.
fn reason(passed: &Passed, noted: &Noted) -> Option<(Reason, Option<Place>)> {
    let address = noted.address;
    if let Some(area) = Area::containing(core::ptr::without_provenance::<u8>(address)) {
        let base = area.base();
        if !passed.areas.contains(&base) {
            let name = format!("{:#x} bytes into the area at {base:#x}", address - base);
            return Some((Reason::NotPassed, Some(Place { name, bytes: area.used() })));
        }
        let Freed { start, len, .. } = area.freed_at(address).filter(|freed| freed.number <= passed.frees)?;
        let name = format!("{:#x} bytes into a block of the area at {base:#x}", address - start);
        return Some((Reason::Freed, Some(Place { name, bytes: len })));
    }
    let in_arena = AreaArena::get().is_ok_and(|arena| arena.range().contains(address));
    let Some(then) = noted.value else {
        // Main may free an area at once after the call.
        let place = Place { name: "an area that is no more".to_owned(), bytes: 0 };
        let was_passed = !in_arena || passed.areas.iter().any(|base| *base <= address);
        return (!was_passed).then_some((Reason::Freed, Some(place)));
    };
    let mut now = [0; 8];
    let own = std::process::id().cast_signed();
    match process_memory::read(own, (address & !7) as u64, &mut now) {
        Err(_) => {
            Some((Reason::Freed, Some(Place { name: "memory that main has unmapped".to_owned(), bytes: 0 })))
        }
        Ok(()) if u64::from_ne_bytes(now) != then => Some((Reason::Stale, None)),
        Ok(()) => None,
    }
}
