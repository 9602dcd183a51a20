//! A thread that is made to perform system calls, and functions of the image.

use std::io;
use std::sync::OnceLock;

use libc::c_long;
use orrery_sys::process_memory;
use orrery_sys::ptrace::{Stop, Tracee};

use crate::image::SYSCALL;
use crate::maps::Maps;

/// How often a thread may stop on its way to a call.
const MOST_STOPS: usize = 1000;
/// Where the vDSO's `syscall` is looked for.
const VDSO_BYTES: usize = 4096;
/// What a function may use below a stack pointer that it was not called with.
pub(super) const BELOW: u64 = 256;
/// Signals that may arrive: what cannot be blocked, what is not any more once the kernel has forced it, and what functions end with.
pub(super) const LATE: [libc::c_int; 3] = [libc::SIGTRAP, libc::SIGSTOP, libc::SIGSYS];

/// A thread that is made to perform system calls. All signals but SIGSYS are blocked in it.
pub(super) struct Puppet<'a> {
    pub(super) tracee: &'a mut Tracee,
    pub(super) registers: libc::user_regs_struct,
    pub(super) gadget: u64,
    /// Where functions have their stack; `None`: below the program's own.
    pub(super) stack: Option<u64>,
    /// An address, and the word that is to be restored there.
    pub(super) covered: Option<(u64, u64)>,
    /// The mask that the program is to begin with.
    pub(super) mask: u64,
    /// The kernel may force a SIGTRAP or a SIGSEGV on it: it ignores neither.
    pub(super) forcible: bool,
    /// Signals that it was sent meanwhile, and is to have afterwards: those of [`LATE`].
    pub(super) late: [bool; LATE.len()],
}

impl Puppet<'_> {
    pub(super) fn run_to_call(&mut self) -> io::Result<()> {
        // What forces a signal on the thread would do so for ever.
        for _ in 0..MOST_STOPS {
            self.tracee.resume_to_syscall(0)?;
            match self.tracee.wait_over_exec() {
                Stop::Call => return Ok(()),
                Stop::Gone => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                // All others are blocked.
                Stop::Signal(signal) => {
                    let _blocked = self.is_late(signal);
                }
                _ => {}
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Lets it make the call that it stands at.
    fn step_over_call(&mut self) -> io::Result<()> {
        let behind = self.gadget + SYSCALL.len() as u64;
        for _ in 0..MOST_STOPS {
            self.tracee.step()?;
            match self.tracee.wait_over_exec() {
                Stop::Signal(libc::SIGTRAP) if self.tracee.registers()?.rip == behind => return Ok(()),
                Stop::Gone => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                Stop::Signal(signal) if self.is_late(signal) => {}
                // What is not blocked is forced: a filter of the program's does not let it call.
                Stop::Signal(_) => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
                _ => {}
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Returns whether a signal can be one that was sent; it is kept for later then.
    fn is_late(&mut self, signal: libc::c_int) -> bool {
        let place = LATE.iter().position(|late| *late == signal).and_then(|index| self.late.get_mut(index));
        place.map(|place| *place = true).is_some()
    }

    pub(super) fn call(&mut self, number: c_long, arguments: [u64; 6]) -> io::Result<u64> {
        let mut registers = self.registers;
        [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9] = arguments;
        registers.rax = number.cast_unsigned();
        registers.orig_rax = u64::MAX;
        registers.rip = self.gadget;
        self.tracee.set_registers(&registers)?;
        if self.forcible {
            self.step_over_call()?;
        } else {
            self.run_to_call()?;
            self.run_to_call()?;
        }
        let result = self.tracee.registers()?.rax.cast_signed();
        if (-4095..0).contains(&result) {
            return Err(io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EIO)));
        }
        Ok(result.cast_unsigned())
    }

    /// Runs a function that ends with SIGSYS, and its result in rbx, which is returned. Its third argument is the program's stack pointer.
    pub(super) fn run(&mut self, function: u64, [first, second]: [u64; 2]) -> io::Result<u64> {
        let mut registers = self.registers;
        (registers.rdi, registers.rsi, registers.rdx) = (first, second, registers.rsp);
        registers.rip = function;
        registers.rsp = self.stack.unwrap_or_else(|| registers.rsp.wrapping_sub(BELOW)) & !15;
        registers.orig_rax = u64::MAX;
        self.tracee.set_registers(&registers)?;
        self.run_to_end()
    }

    /// Lets it run until the function ends that it is in.
    pub(super) fn run_to_end(&mut self) -> io::Result<u64> {
        for _ in 0..MOST_STOPS {
            self.tracee.resume(0);
            match self.tracee.wait_over_exec() {
                Stop::Signal(libc::SIGSYS) => {
                    let registers = self.tracee.registers()?;
                    if !self.has_ended(&registers) {
                        self.is_late(libc::SIGSYS);
                        continue;
                    }
                    let result = registers.rbx.cast_signed();
                    return u64::try_from(result).map_err(|_| {
                        io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EIO))
                    });
                }
                Stop::Gone => return Err(io::Error::from_raw_os_error(libc::ESRCH)),
                Stop::Signal(signal) if self.is_late(signal) => {}
                // What is not blocked is forced: the image does not run here.
                Stop::Signal(_) => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
                _ => {}
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    /// Returns whether the thread is where functions end, behind the call that sends the signal, and was not sent one by others.
    fn has_ended(&self, registers: &libc::user_regs_struct) -> bool {
        const UD2: [u8; 2] = [0x0f, 0x0b];
        let mut next = [0; UD2.len()];
        process_memory::read(self.tracee.pid(), registers.rip, &mut next).is_ok() && next == UD2
    }

    /// Puts back what was covered.
    pub(super) fn uncover(&mut self) -> io::Result<()> {
        let Some((at, word)) = self.covered.take() else { return Ok(()) };
        self.tracee.replace_word(at, word).map(drop)
    }

    /// Finds a `syscall` instruction: the vDSO's, or one that is over the program's first instruction meanwhile.
    pub(super) fn find_gadget(&mut self, maps: &Maps) -> io::Result<()> {
        /// Where it is in the vDSO, which is the same for all programs.
        static OFFSET: OnceLock<Option<u64>> = OnceLock::new();
        let pid = self.tracee.pid();
        if let Some(vdso) = maps.vdso {
            let look = || {
                let mut bytes = vec![0; VDSO_BYTES];
                process_memory::read(pid, vdso, &mut bytes).ok()?;
                Some(bytes.windows(2).position(|pair| pair == SYSCALL)? as u64)
            };
            if let Some(offset) = *OFFSET.get_or_init(look) {
                self.gadget = vdso + offset;
                return Ok(());
            }
        }
        let at = self.registers.rip;
        let mut word = [0; 8];
        process_memory::read(pid, at, &mut word)?;
        word[..2].copy_from_slice(&SYSCALL);
        self.covered = Some((at, self.tracee.replace_word(at, u64::from_le_bytes(word))?));
        self.gadget = at;
        Ok(())
    }
}
