//! Modules: compiled, and checked to import and export nothing else than [`interface`](crate::interface) names.

use wasmtime::{ExternType, FuncType, ValType};

use crate::engine::engine;
use crate::error::LoadError;
use crate::interface;

/// A compiled module.
///
/// Compiling takes milliseconds for each 10 KiB, far longer than any event: a manager compiles on another thread, of ordinary
/// priority, and loads the result.
#[derive(Clone, Debug)]
pub struct Module {
    pub(crate) compiled: wasmtime::Module,
    pub(crate) handles: Vec<String>,
}

impl Module {
    /// The largest module in bytes.
    pub const LARGEST: usize = 256 << 10;

    /// Compiles a module in WebAssembly's binary format; `name` is what errors call it.
    ///
    /// # Errors
    /// [`LoadError::Size`] and [`LoadError::Module`].
    pub fn compile(name: &str, bytes: &[u8]) -> Result<Self, LoadError> {
        let fault = |cause| LoadError::Module { name: name.to_owned(), cause };
        if bytes.len() > Self::LARGEST {
            let (size, limit) = (bytes.len(), Self::LARGEST);
            return Err(LoadError::Size { name: name.to_owned(), size, limit });
        }
        let engine = engine().map_err(fault)?;
        let compiled =
            wasmtime::Module::from_binary(engine, bytes).map_err(|error| fault(one_line(&error)))?;
        let handles = imports(&compiled).map_err(fault)?;
        exports(&compiled).map_err(fault)?;
        Ok(Self { compiled, handles })
    }
}

/// Returns a message of several lines as one.
fn one_line(error: &wasmtime::Error) -> String {
    format!("{error:#}").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Checks the imports; returns the names of handles among them.
fn imports(module: &wasmtime::Module) -> Result<Vec<String>, String> {
    let mut handles = Vec::new();
    for import in module.imports() {
        let (from, name) = (import.module(), import.name());
        let (parameters, results): (&[ValType], &[ValType]) = match (from, name) {
            (interface::HANDLES, _) => (&[], &[ValType::I32]),
            (interface::IMPORTS, "get_attribute" | "log") => (&[ValType::I32, ValType::I32], &[ValType::I32]),
            (interface::IMPORTS, "set_attribute" | "subscribe") => {
                (&[ValType::I32, ValType::I64], &[ValType::I32])
            }
            (interface::IMPORTS, "emit") => (&[ValType::I32, ValType::I32, ValType::I32], &[ValType::I32]),
            (interface::IMPORTS, "clock") => (&[], &[ValType::I64]),
            _ => {
                return Err(format!(
                    "cannot import {from}.{name}: there is no such function; use those of `{}`, and handles from `{}`",
                    interface::IMPORTS,
                    interface::HANDLES
                ));
            }
        };
        match import.ty() {
            ExternType::Func(function) if has(&function, parameters, results) => {}
            _ => {
                return Err(format!(
                    "cannot import {from}.{name}: its type is {}",
                    show(parameters, results)
                ));
            }
        }
        if from == interface::HANDLES {
            handles.push(name.to_owned());
        }
    }
    Ok(handles)
}

fn exports(module: &wasmtime::Module) -> Result<(), String> {
    let expected: [(&str, &[ValType]); 2] = [
        (interface::EVENT, &[ValType::I32, ValType::I64, ValType::I64, ValType::I64]),
        (interface::START, &[]),
    ];
    for (name, parameters) in expected {
        match module.get_export(name) {
            Some(ExternType::Func(function)) if has(&function, parameters, &[]) => {}
            None if name == interface::START => {}
            None => return Err(format!("it exports no function `{name}`")),
            Some(_) => return Err(format!("its export `{name}` is not of type {}", show(parameters, &[]))),
        }
    }
    match module.get_export(interface::MEMORY) {
        None | Some(ExternType::Memory(_)) => Ok(()),
        Some(_) => Err(format!("its export `{}` is no memory", interface::MEMORY)),
    }
}

fn has(function: &FuncType, parameters: &[ValType], results: &[ValType]) -> bool {
    let same = |ours: &[ValType], theirs: Vec<ValType>| {
        ours.len() == theirs.len() && ours.iter().zip(&theirs).all(|(ours, theirs)| ValType::eq(ours, theirs))
    };
    same(parameters, function.params().collect()) && same(results, function.results().collect())
}

fn show(parameters: &[ValType], results: &[ValType]) -> String {
    let list = |types: &[ValType]| types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    format!("({}) -> ({})", list(parameters), list(results))
}
