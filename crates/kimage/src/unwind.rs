//! Where in the kernel a thread is: its stack, frame by frame.
//!
//! The kernel carries the tables that it unwinds its own stack by (ORC): for each run of its code how far from the
//! stack pointer the frame ends, and where the frame pointer of the caller was saved. A walk with them is exact, also
//! through the stacks of interrupts, whereas words that merely look like return addresses are mostly what earlier calls
//! have left there. Source: Linux `arch/x86/kernel/unwind_orc.c`, `arch/x86/include/asm/orc_types.h`.

use crate::error::{Error, Result};
use crate::kernel::Kernel;
use crate::list;
use crate::object::Object;
use crate::registers;
use crate::task::Task;

/// No call is deeper.
const DEEPEST: usize = 128;
/// Where retpolines begin, and what each is called.
const THUNKS: &str = "__x86_indirect_thunk_array";
const THUNK: &str = "__x86_indirect_thunk_";
/// `ORC_REG_*`.
const UNDEFINED: u64 = 0;
const PREVIOUS_STACK: u64 = 1;
const BASE: u64 = 4;
const STACK: u64 = 5;
const BASE_INDIRECT: u64 = 8;
const STACK_INDIRECT: u64 = 9;

/// Where a processor stands: the three registers that a walk begins with, and one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The next instruction.
    pub instruction: u64,
    /// The stack pointer.
    pub stack: u64,
    /// The frame pointer.
    pub base: u64,
    /// The register in which functions leave their results.
    pub result: u64,
}

/// A function that had been called and had not returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Where it goes on: after the call of the next frame; in the innermost one, and where it was interrupted, the next
    /// instruction.
    pub instruction: u64,
    /// The lowest address of what it has on the stack.
    pub start: u64,
    /// The address after its last, which is its own return address.
    pub end: u64,
    /// Whether it did not call the next frame, but was interrupted, or is the innermost.
    pub interrupted: bool,
    /// What the register for results held then, where it was; of no meaning otherwise.
    pub result: u64,
}

impl<'k> Task<'k> {
    /// The calls that a thread is in within the kernel, the innermost first, up to where it came from user space. A
    /// thread that was on a processor begins where that one stood; without that, where the thread had last left a
    /// processor.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`] where the way up the stack is lost.
    pub fn kernel_stack(&self, standing: Option<Standing>) -> Result<Vec<Frame>> {
        if let Some(standing) = standing {
            // A processor that goes from one thread to the next may be on the other one's stack already.
            match self.follow(standing) {
                Ok((frames, true)) => return Ok(frames),
                Err(error) if !self.is_leaving().unwrap_or(false) => return Err(error),
                _ => {}
            }
        }
        match self.follow(left(self.object())?)? {
            (frames, true) => Ok(frames),
            (_, false) => Err(self.object().corrupt("its stack leads to another thread's")),
        }
    }

    /// Returns whether the processor that it is on is about to go to another thread, as the scheduler has decided.
    fn is_leaving(&self) -> Result<bool> {
        let (task, kernel) = (self.object(), self.object().kernel());
        // In the task itself until 5.15.
        let number = task.u64(if task.has("thread_info.cpu") { "thread_info.cpu" } else { "cpu" })?;
        let queue = registers::of_processor(kernel, "runqueues", number)?;
        Ok(kernel.object("rq", queue)?.u64("curr")? != task.address())
    }

    /// Returns the frames from there on, and whether they lead to where this thread came into the kernel.
    fn follow(&self, at: Standing) -> Result<(Vec<Frame>, bool)> {
        let kernel = self.object().kernel();
        let mut walk = Walk { kernel, at, found: Vec::new(), interrupted: true };
        while walk.step()? {
            if walk.found.len() > DEEPEST {
                return Err(self.object().corrupt("its stack never ends"));
            }
        }
        let end = walk.found.last().map_or(0, |frame| frame.end);
        Ok((walk.found, end == self.saved_registers()?.address()))
    }
}

/// Returns where a thread that is on no processor was when it left one.
fn left(task: Object<'_>) -> Result<Standing> {
    let kernel = task.kernel();
    let stack = task.u64("thread.sp")?;
    let frame = kernel.object("inactive_task_frame", stack)?;
    Ok(Standing {
        instruction: frame.u64("ret_addr")?,
        stack: stack.wrapping_add(kernel.types().size("inactive_task_frame")?),
        base: frame.u64("bp")?,
        result: 0,
    })
}

/// What the tables say of an instruction.
struct Rule<'k> {
    entry: Object<'k>,
    kind: Kind,
}

enum Kind {
    /// The caller's address is at the end of the frame.
    Call,
    /// All registers were saved there.
    Registers,
    /// What the processor saves by itself was.
    Interrupt,
}

struct Walk<'k> {
    kernel: &'k Kernel,
    at: Standing,
    found: Vec<Frame>,
    interrupted: bool,
}

impl<'k> Walk<'k> {
    /// Goes from a frame to the next, and gives whether there is one.
    fn step(&mut self) -> Result<bool> {
        let (at, kernel) = (self.at, self.kernel);
        // What was called last in a function may be followed by the next function.
        let within = if self.interrupted { at.instruction } else { at.instruction.wrapping_sub(1) };
        if let Some(end) = self.end_in_thunk() {
            self.found.push(self.frame(end));
            self.at = Standing { instruction: kernel.read_u64(end.wrapping_sub(8))?, stack: end, ..at };
            self.interrupted = false;
            return Ok(true);
        }
        let rule = rule(kernel, within)?;
        let entry = rule.entry;
        let offset = |path| Ok::<u64, Error>(i64::from(signed(entry.u32(path)?)).cast_unsigned());
        let moved = |from: u64| Ok::<u64, Error>(from.wrapping_add(offset("sp_offset")?));
        let end = match entry.u64("sp_reg")? {
            STACK => moved(at.stack)?,
            BASE => moved(at.base)?,
            // The stack of interrupts has the place to go back to at its top.
            STACK_INDIRECT => kernel.read_u64(at.stack)?.wrapping_add(offset("sp_offset")?),
            BASE_INDIRECT => kernel.read_u64(moved(at.base)?)?,
            other => return Err(entry.corrupt(format!("the frame is reckoned from register {other}"))),
        };
        self.found.push(self.frame(end));
        match rule.kind {
            Kind::Call => {
                let back = end.wrapping_sub(8);
                let base = match entry.u64("bp_reg")? {
                    UNDEFINED => at.base,
                    PREVIOUS_STACK => kernel.read_u64(end.wrapping_add(offset("bp_offset")?))?,
                    BASE => kernel.read_u64(at.base.wrapping_add(offset("bp_offset")?))?,
                    other => return Err(entry.corrupt(format!("the base lies by register {other}"))),
                };
                self.at = Standing { instruction: kernel.read_u64(back)?, stack: end, base, result: 0 };
                self.interrupted = false;
            }
            Kind::Registers | Kind::Interrupt => {
                let whole = matches!(rule.kind, Kind::Registers);
                let first = if whole { 0 } else { kernel.types().field("pt_regs", "ip")?.offset };
                let saved = kernel.object("pt_regs", end.wrapping_sub(first))?;
                if saved.u64("cs")? & 3 == 3 {
                    return Ok(false);
                }
                self.at = Standing {
                    instruction: saved.u64("ip")?,
                    stack: saved.u64("sp")?,
                    base: if whole { saved.u64("bp")? } else { at.base },
                    result: if whole { saved.u64("ax")? } else { at.result },
                };
                self.interrupted = true;
            }
        }
        Ok(true)
    }

    fn frame(&self, end: u64) -> Frame {
        let Standing { instruction, stack, result, .. } = self.at;
        Frame { instruction, start: stack, end, interrupted: self.interrupted, result }
    }

    /// Returns where the frame ends of who stands in what calls by register in place of the processor's own
    /// instruction (a retpoline): of that the tables do not tell. It makes a call within itself, changes where that
    /// returns to, and returns.
    fn end_in_thunk(&self) -> Option<u64> {
        let symbols = self.kernel.symbols();
        let start = symbols.get(THUNKS).filter(|&start| self.interrupted && self.at.instruction >= start)?;
        let is_one = |thunk| symbols.name(thunk).is_some_and(|name| name.starts_with(THUNK));
        let is_in = |address| symbols.function(address).is_some_and(|thunk| thunk == start || is_one(thunk));
        if !is_in(self.at.instruction) {
            return None;
        }
        let next = self.kernel.read_u64(self.at.stack).ok()?;
        let has_called_itself = is_in(next) || symbols.function(next) == Some(next);
        self.at.stack.checked_add(if has_called_itself { 16 } else { 8 })
    }
}

/// Returns the lowest 16 bits with their sign.
fn signed(value: u32) -> i16 {
    u16::try_from(value & 0xffff).unwrap_or(0).cast_signed()
}

/// Finds what the tables say of an instruction: the kernel's own or, of a module, that one's.
fn rule(kernel: &Kernel, instruction: u64) -> Result<Rule<'_>> {
    let symbols = kernel.symbols();
    let is_own = match (symbols.get("_stext"), symbols.get("_etext")) {
        (Some(start), Some(end)) => (start..end).contains(&instruction),
        _ => true,
    };
    let (places, rules, count) = if is_own {
        let places = symbols.address("__start_orc_unwind_ip")?;
        let end = symbols.address("__stop_orc_unwind_ip")?;
        (places, symbols.address("__start_orc_unwind")?, end.saturating_sub(places) / 4)
    } else {
        of_module(kernel, instruction)?
    };
    // Each place is recorded as its distance from the record.
    let place = |index: u64| -> Result<u64> {
        let at = places.wrapping_add(index * 4);
        let mut bytes = [0; 4];
        kernel.read(at, &mut bytes)?;
        Ok(at.wrapping_add(i64::from(i32::from_le_bytes(bytes)).cast_unsigned()))
    };
    let (mut low, mut high) = (0, count.min(1 << 24));
    while low < high {
        let middle = low.midpoint(high);
        if place(middle)? <= instruction {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    let lost = || Error::Corrupt {
        kind: "kernel stack",
        address: instruction,
        why: "the unwind tables have no entry for this instruction".to_owned(),
    };
    let index = low.checked_sub(1).ok_or_else(lost)?;
    let size = kernel.types().size("orc_entry")?;
    let entry = kernel.object("orc_entry", rules.wrapping_add(index * size))?;
    if entry.u64("sp_reg")? == UNDEFINED {
        return Err(lost());
    }
    // Until 6.3 a bit said that there is no caller; since then that is a kind, and so is what is not known.
    let first = if entry.has("end") { 0 } else { 2 };
    let kind = match entry.u64("type")?.checked_sub(first) {
        Some(0) => Kind::Call,
        Some(1) => Kind::Registers,
        Some(2) => Kind::Interrupt,
        _ => return Err(lost()),
    };
    Ok(Rule { entry, kind })
}

/// The tables of the module that an instruction is of: where they are, and how long.
fn of_module(kernel: &Kernel, instruction: u64) -> Result<(u64, u64, u64)> {
    let modules = list::members(kernel.variable("modules", "list_head")?, "module", "list");
    for module in modules.found {
        // One of several runs of memory since 6.4, of which code is the first.
        let (base, size) = if module.has("core_layout.base") {
            (module.u64("core_layout.base")?, module.u64("core_layout.size")? & 0xffff_ffff)
        } else {
            let text = kernel.object("module_memory", module.address_of("mem")?)?;
            (text.u64("base")?, text.u64("size")? & 0xffff_ffff)
        };
        if instruction.wrapping_sub(base) < size {
            let tables = (module.u64("arch.orc_unwind_ip")?, module.u64("arch.orc_unwind")?);
            return Ok((tables.0, tables.1, u64::from(module.u32("arch.num_orcs")?)));
        }
    }
    let why = "it is neither the kernel's nor a module's".to_owned();
    Err(Error::Corrupt { kind: "instruction", address: instruction, why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::{DIRECT, Machine, Maker};

    const THREAD: u64 = 16 << 10;
    const REGISTERS: u64 = 168;

    /// Tables for three functions: a handler of interrupts, one that was interrupted, and the way into the kernel.
    fn tables(m: &mut Maker, code: u64) {
        let rules: [(u64, u64, u8); 4] = [(0, 0, 1), (0x100, 24, 0), (0x200, 0, 1), (0x300, 0, 7)];
        let places = DIRECT + m.room(16, 8);
        let entries = DIRECT + m.room(64, 8);
        for (index, (start, offset, kind)) in (0_u64..).zip(rules) {
            let at = places + index * 4;
            let distance = i32::try_from((code + start).cast_signed() - at.cast_signed()).unwrap();
            m.write(at, &distance.to_le_bytes());
            let entry = entries + index * 8;
            m.set(entry, "orc_entry", "sp_offset", offset);
            m.set(entry, "orc_entry", "sp_reg", STACK);
            m.set(entry, "orc_entry", "type", u64::from(kind));
        }
        m.symbols.push(("__start_orc_unwind_ip", places));
        m.symbols.push(("__stop_orc_unwind_ip", places + 16));
        m.symbols.push(("__start_orc_unwind", entries));
    }

    #[test]
    fn a_stack_is_followed_through_an_interrupt() {
        let mut m = Maker::new();
        let code = DIRECT + m.room(0x400, 256);
        tables(&mut m, code);
        let idle = m.task(0, "swapper", None);
        let task = m.task(7, "worker", Some(idle));
        let tasks = [idle, task].map(|task| m.at(task, "task_struct", "tasks"));
        m.ring(&tasks);
        m.symbols.push(("init_task", idle));
        let stack = DIRECT + m.room(THREAD, 4096);
        m.set(task, "task_struct", "stack", stack);
        let user = stack + THREAD - REGISTERS;
        m.set(user, "pt_regs", "cs", 0x33);
        // The function that was interrupted has 16 bytes and its return address.
        let own = user - 24;
        m.write_u64(own + 16, code + 0x210);
        let other = DIRECT + m.room(512, 256);
        for (name, value) in [("cs", 0x10), ("ip", code + 0x180), ("sp", own), ("ax", 77)] {
            m.set(other, "pt_regs", name, value);
        }
        let kernel = Machine::of(m).kernel();
        let worker = kernel.process(7).unwrap();
        let standing = Standing { instruction: code + 0x40, stack: other, base: 0, result: 5 };
        let frames = worker.kernel_stack(Some(standing)).unwrap();
        let found: Vec<_> =
            frames.iter().map(|f| (f.instruction - code, f.start, f.end, f.interrupted)).collect();
        assert_eq!(found, [(0x40, other, other, true), (0x180, own, user, true), (0x210, user, user, false)]);
        assert_eq!(frames.iter().map(|f| f.result).collect::<Vec<_>>(), [5, 77, 0]);
        // What the tables do not tell of ends the walk, and so does what is another thread's stack.
        assert!(worker.kernel_stack(Some(Standing { instruction: code + 0x310, ..standing })).is_err());
        assert!(worker.kernel_stack(Some(Standing { instruction: code - 1, ..standing })).is_err());
        let elsewhere = Standing { instruction: code + 0x220, stack: user + 8, ..standing };
        assert!(worker.kernel_stack(Some(elsewhere)).is_err());
    }
}
