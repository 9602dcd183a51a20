# Calls from rewritten sites that functions are asked about.

# The same registers. Keeps all of them in the form of `StubFrame`; below that are a mark and rbp, as if they were a frame.
.macro orrery_save_registers
    orrery_step 0
    lea rsp, [rsp - 128]
    orrery_step 16
    pushfq
    .set orrery_depth, 17
    .irp register, rcx, rdi, rsi, rdx, r10, r8, r9, rax, rbx, r12, r13, r14, r15
    orrery_step orrery_depth
    push \register
    .set orrery_depth, orrery_depth + 1
    .endr
    orrery_step 30
    push 0
    orrery_step 31
    push 0
    orrery_step 32
    push {mark}
    orrery_step 33
    push rbp
    orrery_step 34
    mov rbp, rsp
    orrery_step {in_stub_call}
    .cfi_def_cfa 6, 8 * 34
    .cfi_offset 6, -8 * 34
    .cfi_offset 16, -8 * 18
.endm
# Calls a function with what `orrery_save_registers` has kept. What functions may change, and the kernel would not, is xmm, but nothing
# of ymm and above, which no instruction of the image touches.
.macro orrery_call function
    lea rdi, [rbp + 16]
    and rsp, -16
    lea rsp, [rsp - 256]
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
    movaps [rsp + 16 * \n], xmm\n
    .endr
    cld
    call \function
    orrery_step {in_stub_call_xmm}
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
    movaps xmm\n, [rsp + 16 * \n]
    .endr
    mov rsp, rbp
    orrery_step {in_stub_call}
.endm

# Makes the flags again what they were, from what `orrery_save_registers` has kept: those of arithmetic and the direction, which functions
# change. All others are as they were; `popfq`, which would write them, takes as long as a handler does. Loses rax and rcx. All x86-64
# processors since 2006 have `sahf`.
.macro orrery_restore_flags
    mov ecx, [rbp + 8 * (34 - 17)]
    bt ecx, 10
    jnc 8f
    std
8:
    # The overflow flag, by a sum that has one; then the lower ones.
    bt ecx, 11
    setc al
    add al, 127
    mov ah, cl
    sahf
.endm

.globl orrery_stub_call
.hidden orrery_stub_call
orrery_stub_call:
    .cfi_startproc
    orrery_save_registers
7:
    orrery_call {stub_call}
    mov r11, rax
    orrery_restore_flags
    mov rax, r11
    pop rbp
    .cfi_same_value 6
    orrery_step 33, 18, {restoring_done}, 0, 17
    # The registers that functions keep are as they were.
    lea rsp, [rsp + 72]
    .set orrery_depth, 24
    .irp register, r9, r8, r10, rdx, rsi, rdi, rcx
    orrery_step orrery_depth, 18, {restoring_done}, 0, 17
    pop \register
    .set orrery_depth, orrery_depth - 1
    .endr
    orrery_step 17, 18, {restoring_done}, 0, 17
    lea rsp, [rsp + 8 + 128]
    orrery_step 0, 0, {done}
    jmp rcx
    .cfi_endproc

# The same registers, and r11: the trampoline. Pushes the same; nothing of the program's is performed here.
.globl orrery_stub_filter
.hidden orrery_stub_filter
orrery_stub_filter:
    .cfi_startproc
    orrery_save_registers
    mov rsi, r11
    orrery_call {stub_filter}
    test rax, rax
    jz 7b
    mov r11, rax
    orrery_restore_flags
    pop rbp
    .cfi_same_value 6
    orrery_step 33, 18, {restoring_unmade}, 0, 17
    lea rsp, [rsp + 64]
    .set orrery_depth, 25
    .irp register, rax, r9, r8, r10, rdx, rsi, rdi, rcx
    orrery_step orrery_depth, 18, {restoring_unmade}, 0, 17
    pop \register
    .set orrery_depth, orrery_depth - 1
    .endr
    orrery_step 17, 18, {restoring_unmade}, 0, 17
    lea rsp, [rsp + 8 + 128]
    orrery_step 0
    jmp r11
    .cfi_endproc
