# Handlers of the program's signals: see `handlers`.

.globl orrery_thunks
.hidden orrery_thunks
.balign 8
orrery_thunks:
    orrery_step {nothing}
    .set orrery_thunk, 0
    .rept {thunks}
    .byte 0xb0, orrery_thunk  # mov al, ...
    jmp orrery_handle
.balign 8
    .set orrery_thunk, orrery_thunk + 1
    .endr
# al: thunk, edi: signal, rsp: frame. All other registers are free, those of a handler being the kernel's to choose.
orrery_handle:
    # What an earlier frame has left there is no mark of this one's.
    mov qword ptr [rsp + {shown}], 0
    movzx eax, al
    lea rcx, [rip + {handlers}]
    mov r12, [rcx + rax * 8]
    # What says that a siginfo was added.
    btr r12, 63
    cmp dword ptr [rip + {sigsys_blocked}], 0
    je 4f
    mov ebx, edi
    mov r13, rsi
    mov r14, rdx
    mov r15, rbp
    mov rdi, rsp
    lea rsp, [rsp - 8]
    mov ebp, 0
    call {show_sigsys}
    lea rsp, [rsp + 8]
    mov rbp, r15
    mov edi, ebx
    mov rsi, r13
    mov rdx, r14
4:
    cmp qword ptr [rip + {config} + {journal}], 0
    je 5f
    mov ebx, edi
    mov r13, rsi
    mov r14, rdx
    mov r15, rbp
    mov rsi, rsp
    lea rsp, [rsp - 8]
    mov ebp, 0
    call {tell}
    lea rsp, [rsp + 8]
    mov rbp, r15
    mov edi, ebx
    mov rsi, r13
    mov rdx, r14
5:
    mov rcx, [rsp + {interrupted}]
    mov rax, rcx
    sub rax, [rip + {config} + {code}]
    cmp rax, [rip + {config} + {code_length}]
    jb 2f
    mov rax, rcx
    sub rax, [rip + {config} + {handlers_code}]
    cmp rax, [rip + {config} + {handlers_length}]
    jb 2f
    cmp rcx, [rip + {lowest_stub}]
    jb 3f
    cmp rcx, [rip + {highest_stub}]
    jae 3f
2:
    mov ebx, edi
    mov rsi, rsp
    lea r13, [rsp + {info}]
    lea rsp, [rsp - {room} - 8]
    lea rdx, [rsp + 8]
    # Who looks for frames from there is not to go on with what the program has in rbp.
    mov r14, rbp
    mov ebp, 0
    call {present}
    mov rbp, r14
    mov rsp, rax
    mov edi, ebx
    mov rsi, r13
    lea rdx, [rsp + 8]
3:
    mov eax, 0
    jmp r12

# rdi: frame, rsi: handler
.globl orrery_deliver
.hidden orrery_deliver
orrery_deliver:
    mov rsp, rdi
    mov qword ptr [rsp + {shown}], 0
    mov r12, rsi
    mov edi, 31
    mov rcx, [rsp + {interrupted}]
    jmp 2b
