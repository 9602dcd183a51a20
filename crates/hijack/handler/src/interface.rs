//! The functions that a handler can import, from the module `orrery`.

use wasmparser::ValType;

/// The module's name in imports.
pub const MODULE: &str = "orrery";
/// The function that a handler exports: it takes a call's number and returns a
/// [verdict](orrery_hijack_image::handler::verdict).
pub const DECIDE: &str = "decide";

/// A function that a handler can import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Import {
    /// `argument(index) -> i64`: an argument of the call, as the program gave it.
    Argument,
    /// `set_argument(index, value)`: has the call performed with this in place of an argument.
    SetArgument,
    /// `answer(value)`: what the call returns, if the verdict is to answer it.
    Answer,
    /// `delay(nanoseconds)`: has the call wait first; the last one holds.
    Delay,
    /// `copy_from(index, offset, to, length) -> i32`: copies what an argument points to; the number of bytes, or -14.
    CopyFrom,
    /// `replace(index, from, length) -> i32`: has an argument point to a copy of these bytes; zero, or an error.
    Replace,
    /// `count(counter, amount) -> i64`: adds to one of the process's counters; what it is then.
    Count,
    /// `emit(from, length) -> i32`: reports these bytes; zero, or an error.
    Emit,
}

impl Import {
    /// All of them, with the names and types that they have in imports.
    pub const ALL: [(Self, &'static str, &'static [ValType], Option<ValType>); 8] = {
        const I32: ValType = ValType::I32;
        const I64: ValType = ValType::I64;
        [
            (Self::Argument, "argument", &[I32], Some(I64)),
            (Self::SetArgument, "set_argument", &[I32, I64], None),
            (Self::Answer, "answer", &[I64], None),
            (Self::Delay, "delay", &[I64], None),
            (Self::CopyFrom, "copy_from", &[I32, I32, I32, I32], Some(I32)),
            (Self::Replace, "replace", &[I32, I32, I32], Some(I32)),
            (Self::Count, "count", &[I32, I64], Some(I64)),
            (Self::Emit, "emit", &[I32, I32], Some(I32)),
        ]
    };

    /// Returns the function of a name, with its parameters and its result.
    pub fn named(name: &str) -> Option<(Self, &'static [ValType], Option<ValType>)> {
        let found = Self::ALL.into_iter().find(|(_, known, ..)| *known == name);
        found.map(|(import, _, parameters, result)| (import, parameters, result))
    }
}
