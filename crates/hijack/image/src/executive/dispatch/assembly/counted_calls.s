# Calls from rewritten sites that are counted, or timed.

# eax: number, rcx: where to return to; rcx and r11 are ours, below the red zone is room
.globl orrery_counted
.hidden orrery_counted
orrery_counted:
    .cfi_startproc
    orrery_step 0
    lea rsp, [rsp - 128]
    orrery_step 16, 0, 0, 0
    push rcx
    orrery_step 17, 17, 0, 0
    mov r11, rax
    orrery_step 17, 17, {r11}, 0
    lahf
    seto al
    push rax
    orrery_step 18, 17, {r11}, 0
    cmp byte ptr [rip + {config} + {thread_counters_enabled}], 0
    je 5f
    .byte 0xf3, 0x48, 0x0f, 0xae, 0xc0  # rdfsbase rax
    mov ecx, 0
    .byte 0xf2, 0x48, 0x0f, 0x38, 0xf1, 0xc8  # crc32 rcx, rax
    movzx ecx, cl
    shl ecx, 4
    push rdx
    orrery_step 19, 17, {r11}, 19
    lea rdx, [rip + {owners}]
    add rcx, rdx
    pop rdx
    orrery_step 18, 17, {r11}, 0
    add rax, [rcx]
    jnz 5f
    mov rcx, [rcx + 8]
    mov eax, r11d
    cmp eax, {other}
    jbe 4f
    mov eax, {other}
4:
    shl eax, 8
    inc qword ptr [rcx + rax + 8]
    jmp 6f
5:
    mov ecx, r11d
    cmp ecx, {other}
    jbe 7f
    mov ecx, {other}
7:
    shl ecx, 8
    add rcx, [rip + {config}]
    lock inc qword ptr [rcx + {calls} + 8]
6:
    pop rax
    orrery_step 17, 17, {r11}, 0
    add al, 127
    sahf
    mov rax, r11
    orrery_step 17, 17, 0, 0
    syscall
    orrery_step 17, 17, {done}, 0
    pop rcx
    orrery_step 16, 0, {done}, 0
    lea rsp, [rsp + 128]
    orrery_step 0, 0, {done}, 0
    jmp rcx
    .cfi_endproc

# Enters a call into the row of its number, in the counters at r11: rax ticks; pushed are number, rdx, start and result. Takes
# the result off.
.macro orrery_enter prefix
    mov ecx, [rsp + 24]
    cmp ecx, {other}
    jbe 2f
    mov ecx, {other}
2:
    shl ecx, 8
    add r11, rcx
    \prefix inc qword ptr [r11 + 8]
    \prefix add qword ptr [r11 + 24], rax
    shr rax, {first_bucket}
    lea rax, [rax + rax + 1]
    bsr rax, rax
    cmp eax, {last_bucket}
    jbe 3f
    mov eax, {last_bucket}
3:
    \prefix inc qword ptr [r11 + rax * 8 + 32]
    pop rax
    orrery_step 21, 18, {done}, 20, 17
    cmp rax, -4095
    jb 4f
    \prefix inc qword ptr [r11 + 16]
4:
.endm

.globl orrery_timed
.hidden orrery_timed
orrery_timed:
    .cfi_startproc
    orrery_step 0
    lea rsp, [rsp - 128]
    orrery_step 16, 0, 0, 0
    pushfq
    orrery_step 17, 0, 0, 0, 17
    push rcx
    orrery_step 18, 18, 0, 0, 17
    push rax
    orrery_step 19, 18, 19, 0, 17
    push rdx
    orrery_step 20, 18, 19, 20, 17
    cmp byte ptr [rip + {config} + {tsc_disabled}], 0
    jne 7f
    rdtsc
    shl rdx, 32
    or rax, rdx
    push rax
    orrery_step 21, 18, 19, 20, 17
    mov rdx, [rsp + 8]
    mov rax, [rsp + 16]
    syscall
    orrery_step 21, 18, {done}, 20, 17
    push rax
    orrery_step 22, 18, {done_pushed}, 20, 17
    cmp byte ptr [rip + {config} + {tsc_disabled}], 0
    jne 8f
    rdtsc
    shl rdx, 32
    or rax, rdx
9:
    sub rax, [rsp + 8]
    cmp byte ptr [rip + {config} + {thread_counters_enabled}], 0
    je 5f
    .byte 0xf3, 0x48, 0x0f, 0xae, 0xc2  # rdfsbase rdx
    mov r11d, 0
    .byte 0xf2, 0x4c, 0x0f, 0x38, 0xf1, 0xda  # crc32 r11, rdx
    movzx r11d, r11b
    shl r11d, 4
    lea rcx, [rip + {owners}]
    add r11, rcx
    add rdx, [r11]
    jnz 5f
    mov r11, [r11 + 8]
    orrery_enter
    jmp 6f
5:
    orrery_step 22, 18, {done_pushed}, 20, 17
    mov r11, [rip + {config}]
    lea r11, [r11 + {calls}]
    orrery_enter lock
6:
    lea rsp, [rsp + 8]
    orrery_step 20, 18, {done}, 20, 17
    pop rdx
    orrery_step 19, 18, {done}, 0, 17
    lea rsp, [rsp + 8]
    orrery_step 18, 18, {done}, 0, 17
    pop rcx
    orrery_step 17, 0, {done}, 0, 17
    popfq
    orrery_step 16, 0, {done}, 0
    lea rsp, [rsp + 128]
    orrery_step 0, 0, {done}, 0
    jmp rcx
# Made tsc_disabled while it called, by a handler.
8:
    orrery_step 22, 18, {done_pushed}, 20, 17
    mov rax, [rsp + 8]
    jmp 9b
# The program may not read the time stamp counter.
7:
    orrery_step 20, 18, 19, 20, 17
    pop rdx
    orrery_step 19, 18, 19, 0, 17
    pop rax
    orrery_step 18, 18, 0, 0, 17
    pop rcx
    orrery_step 17, 0, 0, 0, 17
    popfq
    orrery_step 16, 0, 0, 0
    lea rsp, [rsp + 128]
    orrery_step 0, 0, 0, 0
    jmp orrery_counted
    .cfi_endproc
