//! The unwind table: where the program's registers are at each instruction of the assembly.
//!
//! The assembler writes one entry wherever that changes: see `dispatch/assembly/unwind_steps.s`.

/// From which instruction on the program's registers are where, in the assembly. Distances are in words.
#[repr(C)]
pub(crate) struct Step {
    /// The instruction's distance from the trampolines, in bytes.
    pub(crate) offset: u32,
    /// How much the program's stack pointer is above `rsp`; or one of [`kind`].
    pub(crate) stack: u8,
    /// How much the address to return to is below that pointer; zero: it is in rcx.
    pub(crate) back: u8,
    /// The same about the call's number; or one of [`number`].
    pub(crate) number: u8,
    /// The rule for `rdx`.
    pub(crate) rdx: u8,
    /// And about the flags.
    pub(crate) flags: u8,
    pub(crate) reserved: [u8; 3],
}

/// Other ways to find the registers.
pub(crate) mod kind {
    /// All of these are not below this: no call has so many words on the stack.
    pub(crate) const FIRST: u8 = 241;
    /// There is no call.
    pub(crate) const NOTHING: u8 = 255;
    /// What `orrery_stub_call` has pushed, by its rbp.
    pub(crate) const STUB_CALL: u8 = 254;
    /// The same, and xmm registers are kept below.
    pub(crate) const STUB_CALL_XMM: u8 = 241;
    /// In `orrery_perform`, before the system call.
    pub(crate) const PERFORMS: u8 = 253;
    /// In `orrery_perform`, after the system call.
    pub(crate) const PERFORMED: u8 = 252;
    /// Registers are to be loaded from where rdi points to.
    pub(crate) const AT_RDI: u8 = 251;
    /// Registers are to be loaded from where rcx points to.
    pub(crate) const AT_RCX: u8 = 250;
    /// They are loaded, but for rsp, which is in r11, and rip, which is in rcx.
    pub(crate) const LOADED: u8 = 249;
    /// Registers are to be loaded by `rt_sigreturn` from a context at rsp.
    pub(crate) const FRAME: u8 = 248;
    /// Registers are to be loaded by `rt_sigreturn` from a context at rdi.
    pub(crate) const FRAME_AT_RDI: u8 = 247;
    /// In a function that has pushed its caller's rbp and uses the register.
    pub(crate) const COMPATIBLE: u8 = 246;
    /// The assembly ends here.
    pub(crate) const END: u8 = 245;
    /// At the first instruction of the handler of SIGSYS: its frame begins at rsp.
    pub(crate) const BEGINS: u8 = 242;
    /// Later in the handler of SIGSYS: its frame begins a word above rsp.
    pub(crate) const ENTERED: u8 = 244;
    /// Later still: its frame begins two words above rsp.
    pub(crate) const ENTERED_FURTHER: u8 = 243;
}

/// Where a call's number is, or that it was made.
pub(crate) mod number {
    pub(crate) const RAX: u8 = 0;
    pub(crate) const R11: u8 = 1;
    /// Made: its result is in rax, and rdi to r9 are as pushed by `orrery_stub_call`.
    pub(crate) const RESTORING_DONE: u8 = 2;
    /// Not made yet: it and rdi to r9 are as pushed by `orrery_stub_filter`.
    pub(crate) const RESTORING_UNMADE: u8 = 5;
    /// Made: its result is in rax.
    pub(crate) const DONE: u8 = 3;
    /// Made: its result is 22 words below the program's stack pointer.
    pub(crate) const DONE_PUSHED: u8 = 4;
}
