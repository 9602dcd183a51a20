# Trampolines: eight bytes each, a call and the way back to its site.

.pushsection .text.orrery_trampolines,"ax",@progbits
.balign 64
.globl orrery_trampolines
.hidden orrery_trampolines
orrery_trampolines:
    .cfi_startproc
# Returns to what its jump reads: DW_CFA_expression for rip. Of rip the lowest bits are cleared; four bytes behind that is the jump's
# distance, which counts from eight bytes behind.
    .cfi_def_cfa 7, 0
    .cfi_escape 0x10, 16, 13, 0x80, 0, 0x09, 0xf8, 0x1a, 0x12, 0x23, 4, 0x94, 4, 0x22, 0x23, 8
    .set orrery_trampoline_offset, 0
    .rept {trampolines}
    syscall
    jmp qword ptr [rip + {return_addresses} + orrery_trampoline_offset]
    .set orrery_trampoline_offset, orrery_trampoline_offset + 8
    .endr
    .cfi_endproc
