//! What fuzz targets call, and nobody else.

use crate::update::{Permissions, Record, Update};

/// Checks what a task has sent, and reads it as main does.
///
/// # Panics
/// If records were let through that name memory which nobody allowed.
#[expect(clippy::single_range_in_vec_init, reason = "one range of addresses, not its numbers")]
pub fn update(input: &[u8]) {
    let permissions = Permissions { ranges: vec![0x1000..0x2000], ..Permissions::default() };
    let Ok(update) = Update::check(1, input.to_vec(), &permissions) else { return };
    let mut records = 0;
    for record in update.records() {
        records += 1;
        match record {
            Record::Data(bytes) => assert!(bytes.len() <= input.len()),
            Record::Modify { address, bytes } => {
                assert!((0x1000..=0x2000).contains(&address) && address + bytes.len() <= 0x2000);
            }
            Record::Operation { function, .. } => panic!("there is no code at {function:#x}"),
        }
    }
    assert_eq!(records, update.len());
}
