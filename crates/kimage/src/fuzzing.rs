//! What fuzz targets call, and nobody else.

use crate::{ext4, inode_table, xattr};

/// Reads a block of an ext4 as a directory, as extended attributes, and as an inode.
///
/// # Panics
/// If more is found than there is room for.
pub fn ext4_block(input: &[u8]) {
    let mut names = Vec::new();
    let _ = ext4::read_names(input, &mut names);
    assert!(names.len() <= input.len() / 8, "{} names in {} bytes", names.len(), input.len());
    let mut attributes = Vec::new();
    let _ = xattr::read(input, input, &mut attributes);
    assert!(attributes.len() <= input.len() / 16, "{} attributes in {} bytes", attributes.len(), input.len());
    let _ = (inode_table::attribute_block(input), inode_table::extra(input));
}

/// The bytes of a change that [`kernel_memory`] makes: where, what kind of value, and the value.
#[cfg(any(test, feature = "fuzzing"))]
pub const CHANGE: usize = 2 + 1 + 8;

/// Overwrites words of a machine with two processes, files and sockets, and walks everything in it. Each [`CHANGE`] is a place in
/// words of eight bytes from the first structure on, a kind, and a value.
#[cfg(any(test, feature = "fuzzing"))]
pub fn kernel_memory(input: &[u8]) {
    use std::sync::OnceLock;

    use crate::synthetic::{DIRECT, FIRST, Machine, SIZE, walk_all};

    static MACHINE: OnceLock<Machine> = OnceLock::new();
    let machine = MACHINE.get_or_init(Machine::with_sockets);
    let mut bytes = machine.maker.bytes.clone();
    let (direct, size) = (DIRECT, SIZE as u64);
    for change in input.as_chunks::<CHANGE>().0 {
        let [low, high, kind, value @ ..] = *change;
        let at = FIRST + 8 * usize::from(u16::from_le_bytes([low, high]));
        let value = u64::from_le_bytes(value);
        let (offset, length) = match kind {
            192.. => (4, 4),
            128.. => (0, 4),
            _ => (0, 8),
        };
        let value = match kind % 8 {
            0 => direct + value % size,
            1 => direct + ((value % size) & !0xff),
            2 => ((value % size) & !0xfff) | 0x67,
            // What another place has, such as a pointer to something of the right kind.
            3 | 4 => {
                let from = FIRST + 8 * usize::try_from(value & 0xffff).unwrap_or(0);
                bytes[from..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word))
            }
            5 => 1 << (value % 64),
            6 => value % 1024,
            _ => value,
        };
        if let Some(place) = bytes.get_mut(at + offset..at + offset + length) {
            place.copy_from_slice(&value.to_le_bytes()[..length]);
        }
    }
    walk_all(&machine.kernel_with(bytes));
}
