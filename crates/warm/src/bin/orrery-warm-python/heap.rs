//! Room in the C library's heap, in one place: as [`pools`](crate::pools) does for small Python objects.
//!
//! What malloc(3) is asked for it takes from holes that were freed before, wherever they are, and only then from the
//! end of the heap. The holes are filled, so that a request's memory comes from the end, piece by piece.

/// Pieces larger than this get mappings of their own.
const LARGEST: usize = 64 << 10;
/// Of a size of which there are more holes than this, the rest is left.
const MOST: usize = 1 << 16;

/// Fills the holes.
pub(crate) fn fill_holes() {
    let end = end_of_holes();
    let mut size = LARGEST;
    while size >= 16 {
        for _ in 0..MOST {
            // SAFETY: the piece is never used; it is freed only if it is no hole.
            unsafe {
                let piece = libc::malloc(size);
                if piece.is_null() || piece.addr() >= end {
                    libc::free(piece);
                    break;
                }
            }
        }
        size = if size > 1024 { size / 2 } else { size - 16 };
    }
}

/// Returns where the unused end of the heap begins: the first large piece that comes from there tells.
fn end_of_holes() -> usize {
    for _ in 0..MOST {
        // SAFETY: the piece is never used; it is freed only if it is no hole.
        unsafe {
            let piece = libc::malloc(LARGEST);
            let left = libc::sbrk(0).addr().checked_sub(piece.addr());
            if piece.is_null() || left.is_some_and(|left| left <= 4 * LARGEST) {
                libc::free(piece);
                return piece.addr();
            }
        }
    }
    0
}
