# The image's beginning: makes a program a tracee, and notifies the supervisor by a signal.

.balign 16
.globl orrery_boot
.hidden orrery_boot
orrery_boot:
    orrery_step {nothing}
    call {boot}
    mov rbx, rax
    # The program is to find these as it would have.
    .irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
    pxor xmm\n, xmm\n
    .endr
    mov eax, 39
    syscall
    mov edi, eax
    mov eax, 186
    syscall
    mov esi, eax
    mov edx, 31
    # A siginfo: the signal, no error, SI_QUEUE; from nobody, with no value.
    lea rsp, [rsp - 128]
    mov qword ptr [rsp], 31
    mov dword ptr [rsp + 8], -1
    mov dword ptr [rsp + 12], 0
    mov qword ptr [rsp + 16], 0
    mov qword ptr [rsp + 24], 0
    mov r10, rsp
    mov eax, 297
    syscall
    ud2
