# Calls made by the executive's functions, where these cannot be said in Rust.

# rdi: number, rsi: arguments, rdx: progress
.globl orrery_perform
.hidden orrery_perform
orrery_perform:
    .cfi_startproc
    orrery_step {performs}
    push rbx
    .cfi_def_cfa_offset 16
    .cfi_offset 3, -16
    mov rbx, rdx
    mov rax, rdi
    mov r11, rsi
    mov rdi, [r11]
    mov rsi, [r11 + 8]
    mov rdx, [r11 + 16]
    mov r10, [r11 + 24]
    mov r8, [r11 + 32]
    mov r9, [r11 + 40]
    syscall
    orrery_step {performed}
    mov [rbx + 8], rax
    mov qword ptr [rbx], 1
    pop rbx
    ret
    .cfi_endproc

.globl orrery_set_alternate_stack
.hidden orrery_set_alternate_stack
orrery_set_alternate_stack:
    orrery_step {nothing}
    mov rdx, rsp
    mov esi, 0
    mov esp, 0
    mov eax, 131
    syscall
    mov rsp, rdx
    ret

.globl orrery_compat
.hidden orrery_compat
orrery_compat:
    orrery_step {nothing}
    push rbx
    push rbp
    orrery_step {compatible}, 0, 0, 0
    mov eax, [rdi + 104]
    mov ebx, [rdi + 88]
    mov ecx, [rdi + 112]
    mov edx, [rdi + 96]
    mov esi, [rdi + 72]
    mov ebp, [rdi + 80]
    mov edi, [rdi + 64]
    int 0x80
    pop rbp
    orrery_step {nothing}, 0, 0, 0
    pop rbx
    ret
