//! The functions that modules call. Each checks the handle, then addresses, then asks the host.

use wasmtime::{Caller, Linker, Memory, Result};

use crate::error::Abort;
use crate::handles::{Found, Handle, Rights};
use crate::host::{Host, Refusal, Subscriber};
use crate::instance::State;
use crate::interface;

/// What a call of a host function costs, in operations: about as long as it takes.
const CALL: u64 = 256;

/// Returns a linker with all functions, and one for each handle's name.
pub(crate) fn linker<H: Host>(engine: &wasmtime::Engine, handles: &[String]) -> Result<Linker<State<H>>> {
    let mut linker = Linker::new(engine);
    let from = interface::IMPORTS;
    linker.func_wrap(from, "get_attribute", get_attribute::<H>)?;
    linker.func_wrap(from, "set_attribute", set_attribute::<H>)?;
    linker.func_wrap(from, "subscribe", subscribe::<H>)?;
    linker.func_wrap(from, "emit", emit::<H>)?;
    linker.func_wrap(from, "clock", clock::<H>)?;
    linker.func_wrap(from, "log", log::<H>)?;
    for name in handles {
        let key = name.clone();
        // A module may import a name more than once.
        linker.allow_shadowing(true);
        linker.func_wrap(
            interface::HANDLES,
            name,
            move |mut caller: Caller<'_, State<H>>| -> Result<i32> {
                charge(&mut caller)?;
                // The loader has made sure that the manifest has the name.
                caller
                    .data()
                    .handles
                    .named(&key)
                    .map(Handle::to_module)
                    .ok_or_else(|| Abort::Forged(0).into())
            },
        )?;
    }
    Ok(linker)
}

fn charge<H: Host>(caller: &mut Caller<'_, State<H>>) -> Result<()> {
    let fuel = caller.get_fuel()?.checked_sub(CALL).ok_or(Abort::Fuel)?;
    caller.set_fuel(fuel)
}

/// Returns the capability of a handle, or the code of why not. A handle that was never granted ends the run.
fn capability<H: Host>(
    caller: &Caller<'_, State<H>>,
    handle: i32,
    rights: Rights,
) -> Result<Result<H::Capability, i32>> {
    let handle = Handle::from_module(handle);
    match caller.data().handles.look_up(handle, rights) {
        Found::Granted(capability) => Ok(Ok(capability.clone())),
        Found::Denied => Ok(Err(interface::DENIED)),
        Found::Revoked => Ok(Err(interface::GONE)),
        Found::Forged => Err(Abort::Forged(handle.number()).into()),
    }
}

fn memory<H: Host>(caller: &mut Caller<'_, State<H>>) -> Result<Memory> {
    let export = caller.get_export(interface::MEMORY).and_then(wasmtime::Extern::into_memory);
    export.ok_or_else(|| Abort::Address.into())
}

/// Copies a message out of the module's memory; nothing where it is too long.
fn message<H: Host>(
    caller: &mut Caller<'_, State<H>>,
    at: i32,
    length: i32,
    buffer: &mut [u8; interface::MESSAGE],
) -> Result<Option<usize>> {
    let (at, length) = (at.cast_unsigned() as usize, length.cast_unsigned() as usize);
    let memory = memory(caller)?;
    let bytes = at.checked_add(length).and_then(|end| memory.data(&*caller).get(at..end));
    let bytes = bytes.ok_or(Abort::Address)?;
    let Some(buffer) = buffer.get_mut(..length) else { return Ok(None) };
    buffer.copy_from_slice(bytes);
    Ok(Some(length))
}

fn answer(result: std::result::Result<(), Refusal>) -> i32 {
    result.map_or_else(Refusal::code, |()| interface::OK)
}

fn get_attribute<H: Host>(mut caller: Caller<'_, State<H>>, handle: i32, value: i32) -> Result<i32> {
    charge(&mut caller)?;
    let capability = match capability(&caller, handle, Rights::GET)? {
        Ok(capability) => capability,
        Err(code) => return Ok(code),
    };
    let memory = memory(&mut caller)?;
    let at = value.cast_unsigned() as usize;
    if at.checked_add(size_of::<i64>()).is_none_or(|end| end > memory.data_size(&caller)) {
        return Err(Abort::Address.into());
    }
    Ok(match caller.data().host.get_attribute(&capability) {
        Ok(value) => {
            memory.write(&mut caller, at, &value.to_le_bytes())?;
            interface::OK
        }
        Err(refusal) => refusal.code(),
    })
}

fn set_attribute<H: Host>(mut caller: Caller<'_, State<H>>, handle: i32, value: i64) -> Result<i32> {
    charge(&mut caller)?;
    Ok(match capability(&caller, handle, Rights::SET)? {
        Ok(capability) => answer(caller.data().host.set_attribute(&capability, value)),
        Err(code) => code,
    })
}

fn subscribe<H: Host>(mut caller: Caller<'_, State<H>>, handle: i32, parameter: i64) -> Result<i32> {
    charge(&mut caller)?;
    let capability = match capability(&caller, handle, Rights::SUBSCRIBE)? {
        Ok(capability) => capability,
        Err(code) => return Ok(code),
    };
    let state = caller.data_mut();
    if state.subscriptions as usize >= interface::SUBSCRIPTIONS {
        return Ok(interface::LIMIT);
    }
    let subscriber =
        Subscriber { extension: state.id, subscription: state.subscriptions, incarnation: state.incarnation };
    Ok(match state.host.subscribe(&capability, parameter, subscriber) {
        Ok(()) => {
            state.subscriptions += 1;
            subscriber.subscription.cast_signed()
        }
        Err(refusal) => refusal.code(),
    })
}

fn emit<H: Host>(mut caller: Caller<'_, State<H>>, handle: i32, at: i32, length: i32) -> Result<i32> {
    charge(&mut caller)?;
    let capability = match capability(&caller, handle, Rights::EMIT)? {
        Ok(capability) => capability,
        Err(code) => return Ok(code),
    };
    let mut buffer = [0; interface::MESSAGE];
    let Some(length) = message(&mut caller, at, length, &mut buffer)? else { return Ok(interface::INVALID) };
    if !caller.data_mut().take_message() {
        return Ok(interface::LIMIT);
    }
    Ok(answer(caller.data().host.emit(&capability, &buffer[..length])))
}

fn clock<H: Host>(mut caller: Caller<'_, State<H>>) -> Result<i64> {
    charge(&mut caller)?;
    Ok(caller.data().host.clock().cast_signed())
}

fn log<H: Host>(mut caller: Caller<'_, State<H>>, at: i32, length: i32) -> Result<i32> {
    charge(&mut caller)?;
    let mut buffer = [0; interface::MESSAGE];
    let Some(length) = message(&mut caller, at, length, &mut buffer)? else { return Ok(interface::INVALID) };
    if !caller.data_mut().take_message() {
        return Ok(interface::LIMIT);
    }
    let text = String::from_utf8_lossy(&buffer[..length]);
    let line: String =
        text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect();
    let state = caller.data();
    state.host.log(state.id, &line);
    Ok(interface::OK)
}
