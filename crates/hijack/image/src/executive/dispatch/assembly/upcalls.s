# Functions of the program that the executive calls.

# rdi: function, rsi, rdx and rcx: its arguments, r8: the upper end of its stack
.globl orrery_call_on_stack
.hidden orrery_call_on_stack
orrery_call_on_stack:
    orrery_step {nothing}
    push rbp
    mov rbp, rsp
    mov rsp, r8
    mov rax, rdi
    mov rdi, rsi
    mov rsi, rdx
    mov rdx, rcx
    call rax
    mov rsp, rbp
    pop rbp
    ret
