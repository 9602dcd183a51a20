//! Lists with an entry for each logical thread.

/// Returns what a list has for a logical thread.
pub(crate) fn entry<T>(list: &mut Vec<Option<T>>, logical_thread: u32) -> &mut Option<T> {
    let logical_thread = logical_thread as usize;
    if list.len() <= logical_thread {
        list.resize_with(logical_thread + 1, || None);
    }
    &mut list[logical_thread]
}
