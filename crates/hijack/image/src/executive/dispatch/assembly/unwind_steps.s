# From here on the program's stack pointer is so many words above rsp, and the address to return to, the number, rdx and the
# flags are so many below that; zero: in their registers. See `handlers::Step`.
.macro orrery_step stack, back=0, number=0, rdx=0, flags=0
771:
.pushsection .rodata.orrery_steps,"a",@progbits
    .long 771b - orrery_trampolines
    .byte \stack, \back, \number, \rdx, \flags, 0, 0, 0
.popsection
    .if \stack < {kinds}
    orrery_unwind \stack, \back, \rdx
    .endif
.endm

# The same for debuggers, in the image's .debug_frame (7: rsp, 16: rip, 2: rcx, 1: rdx), which is not loaded into programs.
.macro orrery_unwind stack, back, rdx
    .cfi_def_cfa 7, 8 * (\stack)
    .if \back
    .cfi_offset 16, -8 * (\back)
    .else
    .cfi_register 16, 2
    .endif
    .if \rdx
    .cfi_offset 1, -8 * (\rdx)
    .else
    .cfi_same_value 1
    .endif
.endm
.cfi_sections .debug_frame

.pushsection .rodata.orrery_steps,"a",@progbits
.balign 8
.globl orrery_steps
.hidden orrery_steps
orrery_steps:
.popsection
