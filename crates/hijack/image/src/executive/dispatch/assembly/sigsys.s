# Dispatched calls: the handler of SIGSYS, and the ways back from it.

.balign 16
.globl orrery_sigsys
.hidden orrery_sigsys
orrery_sigsys:
    .cfi_startproc
    orrery_step {begins}
    # What is on the stack from earlier frames says nothing about this call.
    mov qword ptr [rdx + {progress}], 0
    orrery_step {entered}, 0, 0, 0
    push rbp
    .cfi_def_cfa_offset 16
    .cfi_offset 6, -16
    orrery_step {entered_further}, 0, 0, 0
    mov rbp, rsp
    .cfi_def_cfa_register 6
    orrery_step {entered_further}, 0, 0, 0
    call {on_sigsys}
    pop rbp
    .cfi_def_cfa 7, 8
    .cfi_same_value 6
    orrery_step {entered}, 0, 0, 0
    ret
    .cfi_endproc

# A register of the frame that the kernel has made: DW_CFA_expression, rsp and a distance.
.macro orrery_saved register, distance
    .cfi_escape 0x10, \register, 3, 0x77, (\distance) & 0x7f | 0x80, (\distance) >> 7
.endm

.balign 16
# Who looks for the caller of a handler looks one byte before what that returns to; and by this name debuggers show the frame.
orrery_dispatched_call:
    .cfi_startproc
    # The caller's rsp is in the frame, too: DW_CFA_def_cfa_expression.
    .cfi_escape 0x0f, 4, 0x77, ({saved} + 15 * 8) & 0x7f | 0x80, ({saved} + 15 * 8) >> 7, 0x06
    .set orrery_distance, {saved}
    .irp register, 8, 9, 10, 11, 12, 13, 14, 15, 5, 4, 6, 3, 1, 0, 2, 7, 16
    .if \register - 7
    orrery_saved \register, orrery_distance
    .endif
    .set orrery_distance, orrery_distance + 8
    .endr
    nop
.globl orrery_restorer
.hidden orrery_restorer
orrery_restorer:
    orrery_step {frame}
    # So spelled, unwinders know what it is.
    .byte 0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0  # mov rax, 15
    syscall
    ud2
    .cfi_endproc

.globl orrery_sigreturn_at
.hidden orrery_sigreturn_at
orrery_sigreturn_at:
    orrery_step {frame_at_rdi}
    mov rsp, rdi
    orrery_step {frame}, 0, 0, 0
    mov eax, 15
    syscall
    ud2

# rdi: registers, rsi: extended state or 0, rdx: its features
.globl orrery_resume
.hidden orrery_resume
orrery_resume:
    orrery_step {at_rdi}
    test rsi, rsi
    jz 3f
    test rdx, rdx
    jz 2f
    mov rax, rdx
    shr rdx, 32
    xrstor64 [rsi]
    jmp 3f
2:
    fxrstor64 [rsi]
3:
    mov rcx, rdi
    orrery_step {at_rcx}, 0, 0, 0
    push qword ptr [rcx + 136]
    popfq
    mov r8, [rcx]
    mov r9, [rcx + 8]
    mov r10, [rcx + 16]
    mov r12, [rcx + 32]
    mov r13, [rcx + 40]
    mov r14, [rcx + 48]
    mov r15, [rcx + 56]
    mov rdi, [rcx + 64]
    mov rsi, [rcx + 72]
    mov rbp, [rcx + 80]
    mov rbx, [rcx + 88]
    mov rdx, [rcx + 96]
    mov rax, [rcx + 104]
    mov r11, [rcx + 120]
    mov rcx, [rcx + 128]
    orrery_step {loaded}, 0, 0, 0
    # What the registers were in may be overwritten from here on.
    mov rsp, r11
    jmp rcx
