//! What of a module a handler is made of; everything else is refused here.

use std::collections::BTreeMap;

use orrery_hijack_image::handler::{GLOBALS, MEMORY};
use wasmparser::{
    ConstExpr, DataKind, ElementItems, ExternalKind, FuncType, FunctionBody, Operator, Parser, Payload,
    TypeRef, ValType, Validator, WasmFeatures,
};

use crate::error::Fault;
use crate::interface::{DECIDE, Import, MODULE};

/// What handlers are written in: the first version of WebAssembly without floating point, and with sign extension.
const FEATURES: WasmFeatures =
    WasmFeatures::MUTABLE_GLOBAL.union(WasmFeatures::SIGN_EXTENSION).union(WasmFeatures::GC_TYPES);
/// How many functions a module can have.
const FUNCTIONS: usize = 512;
/// How many parameters and variables a function can have.
pub(crate) const LOCALS: u32 = 256;

/// A variable of the module.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Global {
    /// It never changes.
    Constant(ValType, i64),
    /// It is among those that the context has room for, at this index.
    Variable(ValType, usize),
}

/// What a function's index means.
#[derive(Clone, Debug)]
pub(crate) enum Function {
    Import(Import),
    /// The module's own, by its index among these.
    Own(usize),
}

/// A module that was checked.
pub(crate) struct Module<'a> {
    types: Vec<FuncType>,
    /// Of all functions, imports first.
    pub(crate) functions: Vec<(Function, u32)>,
    pub(crate) bodies: Vec<FunctionBody<'a>>,
    /// How many instructions each of them has that are in no loop.
    pub(crate) weights: Vec<i64>,
    pub(crate) globals: Vec<Global>,
    /// What the variables are at first.
    pub(crate) initial: [u64; GLOBALS],
    pub(crate) has_memory: bool,
    pub(crate) data: Vec<u8>,
    /// The index of `decide` among the module's own functions.
    pub(crate) decide: usize,
}

impl<'a> Module<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, Fault> {
        let mut module = Self {
            types: Vec::new(),
            functions: Vec::new(),
            bodies: Vec::new(),
            weights: Vec::new(),
            globals: Vec::new(),
            initial: [0; GLOBALS],
            has_memory: false,
            data: Vec::new(),
            decide: usize::MAX,
        };
        // What is refused is named before a validator says in other words what it does not know.
        for payload in Parser::new(0).parse_all(bytes) {
            module.take(payload?)?;
        }
        Validator::new_with_features(FEATURES).validate_all(bytes)?;
        for body in &module.bodies {
            module.weights.push(weights(&instructions(body)?).0);
        }
        let own = module.functions.get(module.decide);
        match own {
            Some((Function::Own(index), of)) if module.is_decide(*of) => module.decide = *index,
            _ => return Err(Fault::NoDecide),
        }
        Ok(module)
    }

    fn is_decide(&self, of: u32) -> bool {
        self.signature(of).is_some_and(|signature| {
            signature.params() == [ValType::I32] && signature.results() == [ValType::I32]
        })
    }

    pub(crate) fn signature(&self, of: u32) -> Option<&FuncType> {
        self.types.get(usize::try_from(of).ok()?)
    }

    /// Returns how many functions are imported.
    pub(crate) fn imports(&self) -> usize {
        self.functions.len() - self.bodies.len()
    }

    fn take(&mut self, payload: Payload<'a>) -> Result<(), Fault> {
        match payload {
            Payload::TypeSection(section) => {
                for group in section.into_iter_err_on_gc_types() {
                    self.types.push(group?);
                }
            }
            Payload::ImportSection(section) => {
                for import in section.into_imports_with_offsets() {
                    let (offset, import) = import?;
                    self.import(import.module, import.name, import.ty, offset)?;
                }
            }
            Payload::FunctionSection(section) => {
                let offset = section.range().start;
                for (own, of) in section.into_iter().enumerate() {
                    if own >= FUNCTIONS {
                        return Err(Fault::refused(
                            format!("more than {FUNCTIONS} functions"),
                            offset,
                            "a handler is smaller",
                        ));
                    }
                    self.functions.push((Function::Own(own), of?));
                }
            }
            Payload::MemorySection(section) => {
                for memory in section.into_iter_with_offsets() {
                    let (offset, memory) = memory?;
                    if memory.initial > 1 || memory.memory64 || memory.shared {
                        return Err(Fault::refused(
                            format!("a memory of {} pages", memory.initial),
                            offset,
                            "a handler has one page (64 KiB), which nobody shares; link with --initial-memory=65536 and a stack of some KiB",
                        ));
                    }
                    // A memory of no page has no byte, and what names it is out of bounds; `data` says so, too.
                    self.has_memory = memory.initial == 1;
                }
            }
            Payload::GlobalSection(section) => {
                for global in section.into_iter_with_offsets() {
                    let (offset, global) = global?;
                    let of = global.ty.content_type;
                    let value = constant(&global.init_expr, offset)?;
                    self.global(of, value, global.ty.mutable, offset)?;
                }
            }
            Payload::ExportSection(section) => {
                for export in section {
                    let export = export?;
                    if export.name == DECIDE && export.kind == ExternalKind::Func {
                        self.decide = usize::try_from(export.index).unwrap_or(usize::MAX);
                    }
                }
            }
            Payload::StartSection { range, .. } => {
                return Err(Fault::refused(
                    "a start function",
                    range.start,
                    "there is no call before the first one",
                ));
            }
            Payload::ElementSection(section) => {
                for element in section.into_iter_with_offsets() {
                    let (offset, element) = element?;
                    let items = match element.items {
                        ElementItems::Functions(items) => items.count(),
                        ElementItems::Expressions(_, items) => items.count(),
                    };
                    if items != 0 {
                        return Err(Fault::refused(
                            "a table with functions",
                            offset,
                            "functions are called by their names",
                        ));
                    }
                }
            }
            Payload::DataSection(section) => {
                for segment in section.into_iter_with_offsets() {
                    let (offset, segment) = segment?;
                    let DataKind::Active { offset_expr, .. } = segment.kind else {
                        return Err(Fault::refused("passive data", offset, "data has its place in memory"));
                    };
                    let start =
                        usize::try_from(constant(&offset_expr, offset)?.cast_unsigned() & 0xffff_ffff);
                    let end =
                        start.ok().and_then(|start| Some((start, start.checked_add(segment.data.len())?)));
                    let Some((start, end)) =
                        end.filter(|(_, end)| *end <= MEMORY && (self.has_memory || *end == 0))
                    else {
                        return Err(Fault::refused(
                            "data beyond the memory's end",
                            offset,
                            "a handler has one page (64 KiB)",
                        ));
                    };
                    if self.data.len() < end {
                        self.data.resize(end, 0);
                    }
                    self.data[start..end].copy_from_slice(segment.data);
                }
            }
            Payload::CodeSectionEntry(body) => self.bodies.push(body),
            _ => {}
        }
        Ok(())
    }

    fn import(&mut self, from: &str, name: &str, of: TypeRef, offset: usize) -> Result<(), Fault> {
        let what = || format!("cannot import {from}.{name}");
        let known = Import::named(name).filter(|_| from == MODULE);
        let Some((import, parameters, result)) = known else {
            return Err(Fault::refused(
                what(),
                offset,
                "there are argument, set_argument, answer, delay, copy_from, replace, count and emit, of `orrery`",
            ));
        };
        let TypeRef::Func(of) = of else {
            return Err(Fault::refused(what(), offset, "it is a function"));
        };
        let fits = self.signature(of).is_some_and(|signature| {
            signature.params() == parameters && signature.results() == result.as_slice()
        });
        if !fits {
            return Err(Fault::refused(what(), offset, "its type is another one"));
        }
        self.functions.push((Function::Import(import), of));
        Ok(())
    }

    fn global(&mut self, of: ValType, value: i64, mutable: bool, offset: usize) -> Result<(), Fault> {
        if !mutable {
            self.globals.push(Global::Constant(of, value));
            return Ok(());
        }
        let index = self.globals.iter().filter(|global| matches!(global, Global::Variable(..))).count();
        let Some(place) = self.initial.get_mut(index) else {
            return Err(Fault::refused(
                format!("more than {GLOBALS} globals that change"),
                offset,
                "keep further ones in memory",
            ));
        };
        *place = value.cast_unsigned();
        self.globals.push(Global::Variable(of, index));
        Ok(())
    }
}

/// Returns the value of an expression that is a number.
fn constant(expression: &ConstExpr<'_>, offset: usize) -> Result<i64, Fault> {
    let mut operators = expression.get_operators_reader();
    match operators.read()? {
        Operator::I32Const { value } => Ok(i64::from(value)),
        Operator::I64Const { value } => Ok(value),
        other => Err(Fault::refused(
            format!("{} as a first value", name(&other)),
            offset,
            "handlers have i32 and i64, given as numbers",
        )),
    }
}

/// Returns the name of an instruction, as messages have it.
pub(crate) fn name(operator: &Operator<'_>) -> String {
    let shown = format!("{operator:?}");
    let end = shown.find([' ', '{', '(']).unwrap_or(shown.len());
    shown[..end].to_owned()
}

/// Returns a function's instructions, each with its place in the module.
pub(crate) fn instructions<'a>(body: &FunctionBody<'a>) -> Result<Vec<(Operator<'a>, usize)>, Fault> {
    let mut reader = body.get_operators_reader()?;
    let mut instructions = Vec::new();
    while !reader.eof() {
        instructions.push(reader.read_with_offset()?);
    }
    Ok(instructions)
}

/// Returns, for the body and each loop in it by the index of its instruction, how many instructions it has that are in no loop within.
pub(crate) fn weights(operators: &[(Operator<'_>, usize)]) -> (i64, BTreeMap<usize, i64>) {
    let mut loops = BTreeMap::new();
    let (mut body, mut open) = (0, Vec::new());
    for (index, (operator, _)) in operators.iter().enumerate() {
        match operator {
            Operator::Loop { .. } => {
                loops.insert(index, 0);
                open.push(Some(index));
            }
            Operator::Block { .. } | Operator::If { .. } => open.push(None),
            Operator::End => {
                open.pop();
            }
            _ => {}
        }
        let within = open.iter().rev().find_map(|index| *index);
        match within.and_then(|index| loops.get_mut(&index)) {
            Some(weight) => *weight += 1,
            None => body += 1,
        }
    }
    (body, loops)
}
