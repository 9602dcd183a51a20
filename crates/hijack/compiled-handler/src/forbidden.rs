//! Instructions that a handler's code may not have, at no offset: a jump into the middle of it reaches none either.

/// One of them.
type Instruction = (&'static str, fn(&[u8]) -> bool);

/// Whether a byte behind `0f ae` names memory, and this field.
const fn group(byte: u8, field: u8, memory: bool) -> bool {
    byte >> 3 & 7 == field && (byte >> 6 != 3) == memory
}

/// What enters the kernel, and what changes the rights to memory or the bases of segments without it.
const INSTRUCTIONS: [Instruction; 8] = [
    ("syscall", |bytes| matches!(bytes, [0x0f, 0x05, ..])),
    ("sysenter", |bytes| matches!(bytes, [0x0f, 0x34, ..])),
    ("int $0x80", |bytes| matches!(bytes, [0xcd, 0x80, ..])),
    ("wrpkru", |bytes| matches!(bytes, [0x0f, 0x01, 0xef, ..])),
    ("xrstor", |bytes| matches!(bytes, [0x0f, 0xae, modrm, ..] if group(*modrm, 5, true))),
    ("xrstors", |bytes| matches!(bytes, [0x0f, 0xc7, modrm, ..] if group(*modrm, 3, true))),
    ("wrfsbase", |bytes| matches!(bytes, [0x0f, 0xae, modrm, ..] if group(*modrm, 2, false))),
    ("wrgsbase", |bytes| matches!(bytes, [0x0f, 0xae, modrm, ..] if group(*modrm, 3, false))),
];

/// Returns the first place where bytes can be read as one of these instructions, and which.
#[must_use]
pub fn find(code: &[u8]) -> Option<(usize, &'static str)> {
    (0..code.len()).find_map(|at| {
        let bytes = code.get(at..)?;
        INSTRUCTIONS.iter().find(|(_, is_it)| is_it(bytes)).map(|(name, _)| (at, *name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_instruction_is_found_at_any_offset() {
        let all: [(&[u8], &str); 8] = [
            (&[0x0f, 0x05], "syscall"),
            (&[0x0f, 0x34], "sysenter"),
            (&[0xcd, 0x80], "int $0x80"),
            (&[0x0f, 0x01, 0xef], "wrpkru"),
            (&[0x0f, 0xae, 0x28], "xrstor"),
            (&[0x0f, 0xc7, 0x1f], "xrstors"),
            (&[0xf3, 0x48, 0x0f, 0xae, 0xd0], "wrfsbase"),
            (&[0xf3, 0x48, 0x0f, 0xae, 0xd8], "wrgsbase"),
        ];
        for (bytes, name) in all {
            let skipped = bytes.iter().position(|byte| matches!(byte, 0x0f | 0xcd)).unwrap_or(0);
            for before in 0..5 {
                let mut code = vec![0x90; before];
                code.extend(bytes);
                code.push(0xc3);
                assert_eq!(find(&code), Some((before + skipped, name)), "{code:x?}");
            }
        }
        // mfence, fxsave, rdfsbase, xsave, xrstor of a register (lfence).
        for harmless in [
            [0x0f, 0xae, 0xf0],
            [0x0f, 0xae, 0x00],
            [0x0f, 0xae, 0xc0],
            [0x0f, 0xae, 0x20],
            [0x0f, 0xae, 0xe8],
        ] {
            assert_eq!(find(&harmless), None, "{harmless:x?}");
        }
        assert_eq!(find(&[0x0f]), None);
    }
}
