use super::*;

fn code(last: &[u8]) -> [u8; CODE] {
    let mut code = [0x90; CODE];
    code[CODE - last.len()..].copy_from_slice(last);
    code
}

fn lengths(plan: &RewritePlan) -> Vec<u8> {
    plan.steps().iter().map(|step| step.length).collect()
}

#[test]
fn a_mov_makes_room_alone() {
    let plan = plan(&code(&[0xb8, 39, 0, 0, 0, 0x0f, 0x05])).unwrap();
    assert_eq!((lengths(&plan), plan.number), (vec![5], Some(39)));
    // mov $39,%rax
    let plan = super::plan(&code(&[0x48, 0xc7, 0xc0, 39, 0, 0, 0, 0x0f, 0x05])).unwrap();
    assert_eq!((lengths(&plan), plan.number), (vec![7], Some(39)));
}

#[test]
fn what_would_have_faulted_is_no_instruction() {
    // mov $102,%eax; syscall; ret; nopl 0(%rax,%rax,1); mov $107,%eax; syscall: from glibc's `getuid` on.
    let before = [0xb8, 102, 0, 0, 0, 0x0f, 0x05, 0xc3, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0];
    let alone = |last: &[u8]| {
        let plan = plan(&code(&[&before, &before, last].concat()));
        plan.is_some_and(|plan| lengths(&plan) == [5] && plan.number.is_some())
    };
    assert!(alone(&[0xb8, 107, 0, 0, 0, 0x0f, 0x05]));
    // With a number above page zero, add %bh,0x1000(%rax) may be one.
    assert!(!alone(&[0xb8, 0, 16, 0, 0, 0x0f, 0x05]));
    // As may lea 39(%rax),%edi, which reads no memory, and mov %edi,39(%rbp).
    assert!(!alone(&[0x8d, 0xb8, 39, 0, 0, 0, 0x0f, 0x05]));
    assert!(!alone(&[0x89, 0xbd, 39, 0, 0, 0, 0x0f, 0x05]));
}

#[test]
fn glibcs_read_gives_its_comparison() {
    let read = [0x80, 0x3d, 0x55, 0x10, 0x0e, 0, 0, 0x74, 0x10, 0x31, 0xc0, 0x0f, 0x05];
    let plan = plan(&code(&read)).unwrap();
    assert_eq!((lengths(&plan), plan.number), (vec![7, 2, 2], Some(0)));
    assert_eq!(plan.steps()[0].kind, Move::Relative(2));
    assert_eq!(plan.steps()[1].kind, Move::Branch);
}

#[test]
fn gos_syscall6_gives_two_loads() {
    let go = [0x48, 0x89, 0xfa, 0x48, 0x89, 0xce, 0x48, 0x89, 0xdf, 0x0f, 0x05];
    let mut before = code(&go);
    // Something that cannot move.
    before[CODE - go.len() - 1] = 0xc3;
    let plan = plan(&before).unwrap();
    assert_eq!((lengths(&plan), plan.number), (vec![3, 3], None));
    assert_eq!(plan.jump_pads(), [Some(3), None]);
}

#[test]
fn what_needs_rcx_bears_no_landing_before_it() {
    // ret; mov %rbx,%rdi; mov %rcx,%rsi; syscall
    assert_eq!(plan(&code(&[0xc3, 0x48, 0x89, 0xdf, 0x48, 0x89, 0xce, 0x0f, 0x05])), None);
    // ret; test %eax,%eax; je +2; xor %eax,%eax; syscall
    assert_eq!(plan(&code(&[0xc3, 0x85, 0xc0, 0x74, 0x02, 0x31, 0xc0, 0x0f, 0x05])), None);
}

#[test]
fn what_may_fault_or_leaves_stays() {
    // mov 0x12345678(%rdi),%eax
    assert_eq!(plan(&code(&[0x8b, 0x87, 0x78, 0x56, 0x34, 0x12, 0x0f, 0x05])), None);
    // call; jmp; syscall; rep movsb; int3
    for stays in [
        &[0xe8, 0, 0, 0, 0][..],
        &[0xe9, 0, 0, 0, 0],
        &[0xb8, 1, 0, 0, 0, 0x0f, 0x05],
        &[0xb8, 1, 0, 0, 0, 0xf3, 0xa4],
        &[0xb8, 1, 0, 0, 0, 0xcc],
    ] {
        let code = code(&[stays, &[0x0f, 0x05]].concat());
        assert_eq!(plan(&code), None, "{stays:x?}");
    }
}

#[test]
fn the_number_is_what_was_written_last() {
    // mov $202,%eax; xor $0x80,%sil; syscall
    let futex = [0xb8, 202, 0, 0, 0, 0x40, 0x80, 0xf6, 0x80, 0x0f, 0x05];
    let plan = plan(&code(&futex)).unwrap();
    assert_eq!((lengths(&plan), plan.number), (vec![5, 4], Some(202)));
    // mov $1,%eax; mov %edi,%eax; syscall
    let plan = super::plan(&code(&[0xb8, 1, 0, 0, 0, 0x89, 0xf8, 0x0f, 0x05])).unwrap();
    assert_eq!(plan.number, None);
}

/// Each site of a program's code, where an instruction is a `syscall`.
fn each_site(file: &[u8], mut look: impl FnMut(u64, &[u8; CODE])) {
    for (start, end) in code_of(file) {
        for end in start + CODE..=end {
            let code: &[u8; CODE] = file[end - CODE..end].try_into().unwrap();
            let is_call = || Decodings::of(code).agree_on(CODE - SYSCALL) || plan(code).is_some();
            if code[CODE - SYSCALL..] == [0x0f, 0x05] && is_call() {
                look(end as u64, code);
            }
        }
    }
}

fn c_library() -> Option<Vec<u8>> {
    let file = std::env::var("SURVEY").unwrap_or_else(|_| "/lib/x86_64-linux-gnu/libc.so.6".to_owned());
    let read = std::fs::read(&file).ok();
    if read.is_none() {
        orrery_testing::skipped!("no {file}");
    }
    read
}

/// Prints what becomes of the sites of a program: `SURVEY=/bin/busybox cargo test -p orrery-hijack survey -- --nocapture`.
#[test]
fn survey_most_of_the_c_librarys_sites_can_be_rewritten() {
    let Some(file) = c_library() else { return };
    let [mut alone, mut shorter, mut stay, mut unknown] = [0; 4];
    each_site(&file, |end, code| match plan(code) {
        Some(plan) => {
            *(if plan.jump_pads()[0].is_none() { &mut alone } else { &mut shorter }) += 1;
            unknown += usize::from(plan.number.is_none());
        }
        None => {
            println!("stays: the one before {end:#x} of the file");
            stay += 1;
        }
    });
    println!("{alone} by one instruction, {shorter} by several, {stay} stay; {unknown} of any number");
    assert!((alone + shorter) > 20 * stay, "{alone} + {shorter} against {stay}");
}

/// The decoder is the judge: each instruction is the same one, about the same memory or target.
#[test]
fn what_moves_is_the_same_instruction_elsewhere() {
    let Some(file) = c_library() else { return };
    let mut moved = 0;
    each_site(&file, |end, code| {
        let Some(plan) = plan(code) else { return };
        let length = plan.length() + SYSCALL;
        let from = end - length as u64;
        for to in [from + 0x1234_5678, from.wrapping_sub(0x7000_0000)] {
            let mut out = [0; RELOCATED];
            let window = &code[CODE - length..CODE - SYSCALL];
            let relocated = plan.relocate(window, from, to, &mut out).unwrap();
            let decode = |bytes: &[u8], at| {
                let mut decoder = Decoder::with_ip(64, bytes, at, DecoderOptions::NONE);
                let mut all = Vec::new();
                while decoder.can_decode() {
                    let one = decoder.decode();
                    let target = one.is_jcc_short_or_near().then(|| one.near_branch_target());
                    let memory = one.is_ip_rel_memory_operand().then(|| one.ip_rel_memory_address());
                    let operands: Vec<_> = (0..one.op_count())
                        .map(|place| (one.op_kind(place), one.op_register(place)))
                        .collect();
                    let operands = if target.is_some() { Vec::new() } else { operands };
                    let fixed = (memory.is_none() && target.is_none()).then(|| {
                        (
                            one.memory_displacement64(),
                            one.memory_base(),
                            one.memory_index(),
                            one.segment_prefix(),
                        )
                    });
                    let immediate = one.try_immediate(one.op_count().saturating_sub(1)).ok();
                    all.push((one.mnemonic(), target, memory, operands, fixed, immediate));
                }
                all
            };
            assert_eq!(decode(window, from), decode(&out[..relocated.length], to), "before {end:#x}");
            moved += 1;
        }
    });
    assert!(moved > 0);
}

/// Returns the executable segments of a file.
fn code_of(file: &[u8]) -> Vec<(usize, usize)> {
    use object::read::elf::{FileHeader, ProgramHeader};
    let header = object::elf::FileHeader64::<object::Endianness>::parse(file).unwrap();
    let endian = header.endian().unwrap();
    let headers = header.program_headers(endian, file).unwrap();
    let code = headers.iter().filter(|header| {
        header.p_type(endian) == object::elf::PT_LOAD && header.p_flags(endian) & object::elf::PF_X != 0
    });
    let range = |header: &object::elf::ProgramHeader64<_>| {
        let (start, length) = header.file_range(endian);
        (usize::try_from(start).unwrap(), usize::try_from(start + length).unwrap())
    };
    code.map(range).collect()
}

/// Instructions of all lengths: what moves, what refers to its place, what must stay.
const MENU: [&[u8]; 18] = [
    &[0xfc],                                        // cld
    &[0x53],                                        // push %rbx
    &[0x31, 0xd2],                                  // xor %edx,%edx
    &[0x31, 0xc0],                                  // xor %eax,%eax
    &[0x74, 0x10],                                  // je
    &[0x48, 0x89, 0xdf],                            // mov %rbx,%rdi
    &[0x48, 0x89, 0xce],                            // mov %rcx,%rsi
    &[0x4d, 0x89, 0xda],                            // mov %r11,%r10
    &[0x8b, 0x54, 0x24, 0x08],                      // mov 8(%rsp),%edx
    &[0xf3, 0x0f, 0x1e, 0xfa],                      // endbr64
    &[0xb8, 39, 0, 0, 0],                           // mov $39,%eax
    &[0x48, 0x8b, 0x54, 0x24, 0x08],                // mov 8(%rsp),%rdx
    &[0x0f, 0x84, 0, 0x10, 0, 0],                   // je, far
    &[0x80, 0x3d, 0, 0x10, 0, 0, 0],                // cmpb $0,0x1000(%rip)
    &[0x48, 0x8d, 0x15, 0, 0x10, 0, 0],             // lea 0x1000(%rip),%rdx
    &[0x64, 0x48, 0x8b, 0x04, 0x25, 0x10, 0, 0, 0], // mov %fs:0x10,%rax
    &[0x8b, 0x07],                                  // mov (%rdi),%eax
    &[0xe8, 0, 0, 0, 0],                            // call
];

/// A thread at an instruction of a rewritten window finds that instruction, the jump, or a `syscall`.
#[test]
fn no_instruction_of_a_random_window_is_torn() {
    let mut seed = 1_u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(seed >> 33).unwrap() % below
    };
    let (mut plans, mut with_jump_pads) = (0, 0);
    for _ in 0..20_000 {
        let chosen: Vec<&[u8]> = (0..=random(6)).map(|_| MENU[random(MENU.len())]).collect();
        let bytes = [&[0xc3], chosen.concat().as_slice(), &[0x0f, 0x05]].concat();
        let code = code(&bytes);
        let Some(plan) = plan(&code) else { continue };
        plans += 1;
        let window = CODE - SYSCALL - plan.length();
        assert!(window > CODE - bytes.len(), "what is behind the ret alone may move: {bytes:x?}");
        let (mask, value) = plan.distance_constraint();
        let distance = (u32::try_from(random(1 << 30)).unwrap() & !mask | value).cast_signed();
        let (jump, changed) = plan.jump(distance).unwrap();
        let mut after = code;
        after[window..window + changed].copy_from_slice(&jump[..changed]);
        let first = |code: &[u8; CODE], at: usize| {
            let mut decoder = Decoder::with_ip(64, &code[at..], at as u64, DecoderOptions::NONE);
            decoder.decode()
        };
        let mut at = window;
        for step in plan.steps() {
            let (old, new) = (first(&code, at), first(&after, at));
            assert_eq!(old.len(), usize::from(step.length));
            if at == window {
                let target = (window + JUMP) as u64;
                assert_eq!(new.code(), Code::Jmp_rel32_64);
                assert_eq!(new.near_branch_target(), target.wrapping_add_signed(distance.into()));
            } else if at < window + JUMP {
                assert_eq!(new.code(), Code::Syscall, "{bytes:x?}");
                with_jump_pads += 1;
            } else {
                assert_eq!(new, old, "{bytes:x?}");
            }
            at += old.len();
        }
        assert_eq!(first(&after, at).code(), Code::Syscall);
    }
    assert!(plans > 5_000 && with_jump_pads > 500, "{plans}, {with_jump_pads}");
}
