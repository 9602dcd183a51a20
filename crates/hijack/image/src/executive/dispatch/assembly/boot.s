# The image's beginning: makes a program a tracee, and notifies the supervisor by a signal.

.balign 16
.globl orrery_boot
.hidden orrery_boot
orrery_boot:
    orrery_step {nothing}
    call {boot}
    mov rbx, rax
.Lboot_ends:
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

# What comes before that, where the image's code is attached and its data is not there yet: the call that attached the code has
# returned to here. rbx points to a `Loading` on the stack, which ends there. Ends with NOT_LOADED where the data cannot be made.
.balign 16
.globl orrery_load
.hidden orrery_load
orrery_load:
    orrery_step {nothing}
    mov rsp, rbx
    # mmap: to read and to write, private, of no file, and in nobody else's place.
    mov rdi, [rbx + {data}]
    mov rsi, [rbx + {data_length}]
    mov edx, 3
    mov r10d, 0x100022
    mov r8, -1
    xor r9d, r9d
    mov eax, 9
    syscall
    cmp rax, rdi
    jne .Lunloaded
    lea rsi, [rbx + {loading}]
    mov rcx, [rbx + {bytes}]
    rep movsb
    mov rdi, [rbx + {table}]
    mov rcx, [rbx + {table_bytes}]
    rep movsb
    # madvise: MADV_DONTNEED.
    mov rdi, [rbx + {page}]
    mov esi, 4096
    mov edx, 4
    mov eax, 28
    syscall
    test rax, rax
    jnz .Lunmap
    mov rdi, [rbx + {boot_checked}]
    mov rsi, [rbx + {boot_options}]
    mov rdx, [rbx + {boot_stack}]
    jmp orrery_boot
.Lunloaded:
    test rax, rax
    js .Lnot_loaded
    # A kernel before 4.17 has mapped it elsewhere.
    mov rdi, rax
    mov rsi, [rbx + {data_length}]
    jmp .Lunmap_this
.Lunmap:
    mov rdi, [rbx + {data}]
    mov rsi, [rbx + {data_length}]
.Lunmap_this:
    mov eax, 11
    syscall
.Lnot_loaded:
    mov rbx, -{not_loaded}
    jmp .Lboot_ends
