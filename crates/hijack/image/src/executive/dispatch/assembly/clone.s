# Threads and processes: control comes back twice, or on another stack.

.globl orrery_sigreturn_releasing
.hidden orrery_sigreturn_releasing
orrery_sigreturn_releasing:
    orrery_step {nothing}
    mov rsp, rdi
    mov dword ptr [rsi], 0
    mov eax, 15
    syscall
    ud2

.globl orrery_unmap_and_exit
.hidden orrery_unmap_and_exit
orrery_unmap_and_exit:
    orrery_step {nothing}
    mov eax, 11
    syscall
    mov edi, 0
    mov eax, 60
    syscall
    ud2

# rdi: registers, rsi: extended state or 0, rdx: its features
.globl orrery_clone
.hidden orrery_clone
orrery_clone:
    orrery_step {nothing}
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    pushfq
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
    mov r8, [rdi]
    mov r9, [rdi + 8]
    mov r10, [rdi + 16]
    mov r12, [rdi + 32]
    mov r13, [rdi + 40]
    mov r14, [rdi + 48]
    mov r15, [rdi + 56]
    mov rsi, [rdi + 72]
    mov rbp, [rdi + 80]
    mov rbx, [rdi + 88]
    mov rdx, [rdi + 96]
    mov rax, [rdi + 104]
    push qword ptr [rdi + 136]
    mov rdi, [rdi + 64]
    popfq
    syscall
    mov rcx, rax
    jrcxz 4f
    popfq
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    ret
# The child: arms dispatch, sets the handler (it may have asked for none) and its mask, goes on.
4:
    # Where a filter would end it for that, it only counts itself.
    movzx ecx, byte ptr [rip + {config} + {arming_forbidden}]
    jrcxz 8f
    mov rcx, [rip + {config}]
    lock inc qword ptr [rcx + {unarmed}]
    mov eax, 0
    jmp qword ptr [rsp - 8]
8:
    lea rsp, [rsp - 16]
    push rdi
    push rsi
    push rdx
    push r10
    push r8
    mov edi, 59
    mov esi, 1
    mov rdx, [rip + {config} + {code}]
    mov r10, [rip + {config} + {code_length}]
    mov r8d, 0
    mov eax, 157
    syscall
    mov rcx, rax
    jrcxz 5f
    mov rcx, [rip + {config}]
    lock inc qword ptr [rcx + {unarmed}]
5:
    mov edi, 31
    lea rsi, [rip + {config} + {action}]
    mov edx, 0
    mov r10d, 8
    mov eax, 13
    syscall
    mov edi, 2
    lea rsi, [rsp + 40]
    mov edx, 0
    mov r10d, 8
    mov eax, 14
    syscall
    pop r8
    pop r10
    pop rdx
    pop rsi
    pop rdi
    lea rsp, [rsp + 16]
    mov eax, 0
    jmp qword ptr [rsp - 8]

# rdi: slot, rsi: call, rdx: stack. What is needed afterwards is kept in registers: the child uses this stack.
.globl orrery_vfork
.hidden orrery_vfork
orrery_vfork:
    orrery_step {nothing}
    mov rsp, rdx
    mov rbx, rdi
    mov rbp, rdx
    mov rax, [rsi]
    mov rdi, [rsi + 8]
    mov rdx, [rsi + 24]
    mov r10, [rsi + 32]
    mov r8, [rsi + 40]
    mov r9, [rsi + 48]
    mov rsi, [rsi + 16]
    syscall
    mov rsp, rbp
    mov rdi, rbx
    mov ebp, 0
    test rax, rax
    jnz 6f
    call {vfork_child}
    ud2
6:
    mov rsi, rax
    call {vfork_parent}
    ud2
