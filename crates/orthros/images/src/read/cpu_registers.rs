//! The registers that the processors had when they were stopped, as the hypervisor prints them.
//!
//! A thread's registers are in memory while it is in the kernel. Where a processor was stopped from outside while a
//! thread ran in user space, they are in that processor only; and vector registers stay in the processor even while the
//! thread is in the kernel, until another thread needs them. QEMU's monitor prints them all: `info registers -a`.

use std::collections::HashMap;

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{Kernel, Registers, Standing, Task};

/// A processor's registers by their names: each with the numbers that follow it.
#[derive(Debug, Default)]
struct Processor(HashMap<String, Vec<u64>>);

/// The registers of all processors of a machine, when it was stopped.
#[derive(Debug, Default)]
pub struct CpuRegisters(Vec<Processor>);

impl CpuRegisters {
    /// Parses what QEMU's monitor prints for `info registers -a`.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        let mut all = Vec::new();
        for part in text.split("CPU#").skip(1) {
            let mut registers: HashMap<String, Vec<u64>> = HashMap::new();
            let mut last = String::new();
            // `R8 =1` and `RAX=1` alike; a name's further numbers follow without a name.
            for word in part.replace(" =", "=").split_whitespace() {
                let value = match word.split_once('=') {
                    Some((name, value)) => {
                        name.trim_start_matches('[').clone_into(&mut last);
                        value
                    }
                    None => word,
                };
                if let Ok(number) = u64::from_str_radix(value, 16) {
                    registers.entry(last.clone()).or_default().push(number);
                }
            }
            all.push(Processor(registers));
        }
        Self(all)
    }

    /// The processor that a thread was on.
    fn of(&self, kernel: &Kernel, thread: &Task<'_>) -> Option<&Processor> {
        (0..).zip(&self.0).find_map(|(number, processor)| {
            let running = kernel.running_on(number).ok()?;
            (running.object().address() == thread.object().address()).then_some(processor)
        })
    }

    /// The registers of a thread that was running in user space; nothing of one that was in the kernel.
    ///
    /// # Errors
    ///
    /// Where the thread was just entering or leaving the kernel: then its registers are half here and half there.
    pub(super) fn general(&self, kernel: &Kernel, thread: &Task<'_>) -> Result<Option<Registers>> {
        let Some(processor) = self.of(kernel, thread) else { return Ok(None) };
        if processor.number("CPL")? == 3 {
            return processor.general().map(Some);
        }
        let (symbols, ip) = (kernel.symbols(), processor.number("RIP")?);
        let bounds = (symbols.get("__entry_text_start"), symbols.get("__entry_text_end"));
        if let (Some(start), Some(end)) = bounds
            && (start..end).contains(&ip)
        {
            bail!("it was stopped while it entered or left the kernel, with its registers half saved");
        }
        Ok(None)
    }

    /// Returns where in the kernel the processor stands that a thread was on; nothing where it was on none.
    ///
    /// # Errors
    ///
    /// Where that processor's registers are unknown.
    pub(super) fn standing(&self, kernel: &Kernel, thread: &Task<'_>) -> Result<Option<Standing>> {
        let Some(processor) = self.of(kernel, thread) else { return Ok(None) };
        Ok(Some(Standing {
            instruction: processor.number("RIP")?,
            stack: processor.number("RSP")?,
            base: processor.number("RBP")?,
            result: processor.number("RAX")?,
        }))
    }

    /// Returns whether the registers of any processor are known.
    pub(super) fn are_known(&self) -> bool {
        !self.0.is_empty()
    }

    /// The vector registers of a thread that was on a processor, as `fxsave` would have written them.
    pub(super) fn float(&self, kernel: &Kernel, thread: &Task<'_>) -> Result<Option<Vec<u8>>> {
        self.of(kernel, thread).map(Processor::float).transpose()
    }
}

impl Processor {
    fn numbers(&self, name: &str) -> Result<&[u64]> {
        let found = self.0.get(name).map(Vec::as_slice);
        found.with_context(|| format!("the hypervisor does not print the register {name}"))
    }

    fn number(&self, name: &str) -> Result<u64> {
        Ok(self.numbers(name)?.first().copied().unwrap_or(0))
    }

    fn general(&self) -> Result<Registers> {
        let n = |name| self.number(name);
        let base = |name| -> Result<u64> { Ok(self.numbers(name)?.get(1).copied().unwrap_or(0)) };
        Ok(Registers {
            r15: n("R15")?,
            r14: n("R14")?,
            r13: n("R13")?,
            r12: n("R12")?,
            bp: n("RBP")?,
            bx: n("RBX")?,
            r11: n("R11")?,
            r10: n("R10")?,
            r9: n("R9")?,
            r8: n("R8")?,
            ax: n("RAX")?,
            cx: n("RCX")?,
            dx: n("RDX")?,
            si: n("RSI")?,
            di: n("RDI")?,
            orig_ax: u64::MAX,
            ip: n("RIP")?,
            cs: n("CS")?,
            flags: n("RFL")?,
            sp: n("RSP")?,
            ss: n("SS")?,
            fs_base: base("FS")?,
            gs_base: base("GS")?,
            ds: n("DS")?,
            es: n("ES")?,
            fs: n("FS")?,
            gs: n("GS")?,
        })
    }

    /// Intel SDM volume 1, 10.5.1. Where the last floating-point instruction was is unknown, and left zero.
    fn float(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; 512];
        let mut put = |at: usize, value: u64, size: usize| {
            bytes[at..at + size].copy_from_slice(&value.to_le_bytes()[..size])
        };
        let status = self.number("FSW")?;
        put(0, self.number("FCW")?, 2);
        put(2, status, 2);
        put(4, self.number("FTW")?, 1);
        put(24, self.number("MXCSR")?, 4);
        put(28, 0xffff, 4);
        // Saved from the top of the stack on; reported by their own numbers.
        let top = usize::try_from(status >> 11 & 7)?;
        for index in 0..8 {
            let register = self.numbers(&format!("FPR{}", (top + index) & 7))?;
            let &[fraction, exponent, ..] = register else { bail!("FPR{index} has no exponent") };
            put(32 + index * 16, fraction, 8);
            put(40 + index * 16, exponent, 2);
        }
        for index in 0..16 {
            // The widest that the processor has is reported, from its highest part down.
            let wide = ["XMM", "YMM", "ZMM"].iter().find_map(|kind| self.0.get(&format!("{kind}{index:02}")));
            let Some(&[.., high, low]) = wide.map(Vec::as_slice) else { bail!("XMM{index} is not known") };
            put(160 + index * 16, low, 8);
            put(168 + index * 16, high, 8);
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRINTED: &str = "\r\nCPU#0\r\nRAX=0000000000000001 RBX=0000000000000002 RCX=3 RDX=4\r\nRSI=5 RDI=6 RBP=7 RSP=00007ffd00001000\r\n\
        R8 =8 R9 =9 R10=a R11=b\r\nR12=c R13=d R14=e R15=f\r\nRIP=0000000000401000 RFL=00000246 [---Z-P-] CPL=3 II=0 A20=1 SMM=0 HLT=0\r\n\
        ES =0000 0000000000000000 00000000 00000000\r\nCS =0033 0000000000000000 ffffffff 00affb00 DPL=3 CS64 [-RA]\r\n\
        SS =002b 0000000000000000 ffffffff 00cff300 DPL=3 DS   [-WA]\r\nDS =0000 0 0 0\r\nFS =0000 00007f0000000740 0 0\r\n\
        GS =0000 0000000000000000 0 0\r\nFCW=037f FSW=3800 [ST=7] FTW=80 MXCSR=00001f80\r\n\
        FPR0=0 0 FPR1=0 0 FPR2=0 0 FPR3=0 0 FPR4=0 0 FPR5=0 0 FPR6=0 0 FPR7=c000000000000000 4000\r\n\
        XMM00=0000000000000011 0000000000000022 XMM01=0 0 XMM02=0 0 XMM03=0 0 XMM04=0 0 XMM05=0 0 XMM06=0 0 XMM07=0 0\r\n\
        XMM08=0 0 XMM09=0 0 XMM10=0 0 XMM11=0 0 XMM12=0 0 XMM13=0 0 XMM14=0 0 XMM15=00000000000000aa 00000000000000bb\r\n\
        \r\nCPU#1\r\nRAX=77 CPL=0 RIP=ffffffff81000000\r\n";

    #[test]
    fn registers_are_read_as_the_monitor_prints_them() {
        let cpus = CpuRegisters::parse(PRINTED);
        assert_eq!(cpus.0.len(), 2);
        let registers = cpus.0[0].general().unwrap();
        assert_eq!((registers.ax, registers.r8, registers.r15), (1, 8, 15));
        assert_eq!((registers.cs, registers.fs_base, registers.ip), (0x33, 0x7f00_0000_0740, 0x40_1000));
        assert_eq!((registers.flags, registers.orig_ax), (0x246, u64::MAX));
        assert_eq!(cpus.0[1].number("RAX").unwrap(), 0x77);
        assert!(cpus.0[1].general().is_err() && cpus.0[1].float().is_err());
    }

    #[test]
    fn vector_registers_lie_as_fxsave_lays_them() {
        let bytes = CpuRegisters::parse(PRINTED).0[0].float().unwrap();
        assert_eq!(bytes[..5], [0x7f, 0x03, 0x00, 0x38, 0x80]);
        // Register 7 is the top of the stack.
        assert_eq!((bytes[39], bytes[41]), (0xc0, 0x40));
        assert_eq!((bytes[160], bytes[168], bytes[160 + 240], bytes[168 + 240]), (0x22, 0x11, 0xbb, 0xaa));
    }

    #[test]
    fn garbage_has_no_registers() {
        for text in ["", "CPU#", "CPU#0 RAX", "CPU#0 =1 ==2 XMM00=zz"] {
            let cpus = CpuRegisters::parse(text);
            assert!(cpus.0.iter().all(|cpu| cpu.general().is_err() && cpu.float().is_err()));
        }
    }
}
