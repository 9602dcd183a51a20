//! The registers with which a thread will go on in user space.
//!
//! Whenever a thread enters the kernel, by a system call, a fault or an interrupt, its general registers are pushed at
//! the top of its kernel stack. A thread that was running in user space at the moment of the crash was interrupted by
//! the crashing CPU's message to the others, so its registers are there too. What is *not* there is the state of the
//! registers of a CPU that was frozen from outside in user space: that CPU's owner knows them.

use crate::error::Result;
use crate::object::Object;
use crate::task::Task;

/// `THREAD_SIZE` where the kernel does not tell.
const STACK: u64 = 16 << 10;
/// What `fxsave` writes, the first part of every saved floating-point state.
const FXSAVE: usize = 512;

/// `struct pt_regs`, in the kernel's order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "registers are called as they are")]
pub struct Registers {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub bp: u64,
    pub bx: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub ax: u64,
    pub cx: u64,
    pub dx: u64,
    pub si: u64,
    pub di: u64,
    /// The number of the system call that the thread is in; negative where it is in none.
    pub orig_ax: u64,
    pub ip: u64,
    pub cs: u64,
    pub flags: u64,
    pub sp: u64,
    pub ss: u64,
    pub fs_base: u64,
    pub gs_base: u64,
    pub ds: u64,
    pub es: u64,
    pub fs: u64,
    pub gs: u64,
}

/// The state of the floating-point and vector registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FloatState {
    /// As `fxsave` or `xsave` laid it out; at least 512 bytes.
    pub bytes: Vec<u8>,
    /// Whether the registers' own contents are newer, as the thread was on a CPU and had not left it.
    pub stale: bool,
}

impl<'k> Task<'k> {
    /// Returns where they lie that were saved when it came into the kernel.
    pub(crate) fn saved_registers(&self) -> Result<Object<'k>> {
        let kernel = self.object().kernel();
        let symbols = kernel.symbols();
        let bounds = (symbols.get("__start_init_task"), symbols.get("__end_init_task"));
        let size = match bounds {
            (Some(start), Some(end)) if (4096..=1 << 20).contains(&end.wrapping_sub(start)) => end - start,
            _ => STACK,
        };
        let top = self.object().u64("stack")?.wrapping_add(size);
        kernel.object("pt_regs", top.wrapping_sub(kernel.types().size("pt_regs")?))
    }

    /// The registers with which it goes on in user space.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`](crate::Error::Corrupt) where they cannot be a user's.
    pub fn registers(&self) -> Result<Registers> {
        let (task, saved) = (self.object(), self.saved_registers()?);
        let read = |path| saved.u64(path);
        let registers = Registers {
            r15: read("r15")?,
            r14: read("r14")?,
            r13: read("r13")?,
            r12: read("r12")?,
            bp: read("bp")?,
            bx: read("bx")?,
            r11: read("r11")?,
            r10: read("r10")?,
            r9: read("r9")?,
            r8: read("r8")?,
            ax: read("ax")?,
            cx: read("cx")?,
            dx: read("dx")?,
            si: read("si")?,
            di: read("di")?,
            orig_ax: read("orig_ax")?,
            ip: read("ip")?,
            // From 6.9 on the upper half of these two words carries what FRED adds.
            cs: read("cs")? & 0xffff,
            flags: read("flags")?,
            sp: read("sp")?,
            ss: read("ss")? & 0xffff,
            fs_base: task.u64("thread.fsbase")?,
            gs_base: task.u64("thread.gsbase")?,
            ds: task.u64("thread.ds")?,
            es: task.u64("thread.es")?,
            fs: task.u64("thread.fsindex")?,
            gs: task.u64("thread.gsindex")?,
        };
        if registers.cs & 3 != 3 || registers.ip >= 1 << 56 {
            return Err(
                saved.corrupt(format!("cs {:#x}, ip {:#x} are no user's", registers.cs, registers.ip))
            );
        }
        Ok(registers)
    }

    /// The floating-point and vector registers as they were last saved.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn float_state(&self) -> Result<FloatState> {
        let task = self.object();
        // `TIF_NEED_FPU_LOAD`: what memory holds is what counts. Without that bit in a kernel's flags the registers of
        // the CPU do, but only if the thread is on one.
        let stale = task.u64("on_cpu")? != 0 && task.u64("thread_info.flags")? & (1 << 14) == 0;
        // Behind a pointer since 5.16, in the task before.
        let (regs, size) = if task.has("thread.fpu.fpstate") {
            let state = task.required("thread.fpu.fpstate", "fpstate")?;
            (state.address_of("regs")?, state.u64("size")?)
        } else {
            (task.address_of("thread.fpu.state")?, FXSAVE as u64 + 64)
        };
        let size = usize::try_from(size).unwrap_or(0).clamp(FXSAVE, 16 << 10);
        let mut bytes = vec![0; size];
        task.kernel().read(regs, &mut bytes)?;
        Ok(FloatState { bytes, stale })
    }
}

/// The task that a CPU was running, an idle one included, by the number of the CPU: whose registers it has. The scheduler's
/// own note (`runqueues.curr`) is ahead of that while it goes from one to the next.
pub(crate) fn current<'k>(kernel: &'k crate::Kernel, cpu: u64) -> Result<Object<'k>> {
    let (symbols, own) = (kernel.symbols(), |symbol| of_processor(kernel, symbol, cpu));
    // Among other things that are needed often since 6.2, by itself before.
    let task = if symbols.get("pcpu_hot").is_some() {
        kernel.object("pcpu_hot", own("pcpu_hot")?)?.u64("current_task")?
    } else if symbols.get("current_task").is_some() {
        kernel.read_u64(own("current_task")?)?
    } else {
        kernel.object("rq", own("runqueues")?)?.u64("curr")?
    };
    kernel.object("task_struct", task)
}

/// Returns where a CPU has its own of a variable that each has.
pub(crate) fn of_processor(kernel: &crate::Kernel, symbol: &str, cpu: u64) -> Result<u64> {
    let symbols = kernel.symbols();
    let offset = symbols.address("__per_cpu_offset")?.wrapping_add(cpu.wrapping_mul(8));
    Ok(symbols.address(symbol)?.wrapping_add(kernel.read_u64(offset)?))
}

impl crate::Kernel {
    /// The thread that a CPU was running when the kernel died; its idle task where it ran none.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn running_on(&self, cpu: u64) -> Result<Task<'_>> {
        Task::check(current(self, cpu)?)
    }
}

#[cfg(test)]
mod tests {
    use crate::synthetic::{DIRECT, Machine, Maker};

    /// While a processor goes from one thread to the next the scheduler has noted the next one already.
    #[test]
    fn a_processors_registers_are_those_of_the_thread_that_it_notes_itself() {
        let mut m = Maker::new();
        let (one, next) = (m.task(0, "swapper", None), m.task(7, "worker", None));
        let (offsets, own) = (DIRECT + m.room(16, 8), DIRECT + m.room(64, 8));
        m.write_u64(offsets + 8, own - 0x100);
        m.write_u64(own, one);
        m.write_u64(own + 8, next);
        m.symbols.extend([("__per_cpu_offset", offsets), ("current_task", 0x100), ("runqueues", 0x108)]);
        let kernel = Machine::of(m).kernel();
        assert_eq!(kernel.running_on(1).unwrap().object().address(), one);
    }
}
