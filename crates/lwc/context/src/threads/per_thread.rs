//! Lists with an entry for each logical thread.

/// What a list has for a strand.
pub(crate) fn entry<T>(list: &mut Vec<Option<T>>, strand: u32) -> &mut Option<T> {
    let strand = strand as usize;
    if list.len() <= strand {
        list.resize_with(strand + 1, || None);
    }
    &mut list[strand]
}
