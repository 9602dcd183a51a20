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
