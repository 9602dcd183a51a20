//! Patterns for paths: `*` and `?` stand for anything but a slash, `**` for anything.
//!
//! `/dir/**` is `/dir` itself, too. Several patterns may be given in one text, with zero bytes between them.

/// Separates patterns in one text.
pub const SEPARATOR: u8 = 0;

/// Returns whether a text is what one of these patterns says.
pub fn any_matches(patterns: &[u8], text: &[u8]) -> bool {
    patterns.split(|byte| *byte == SEPARATOR).any(|pattern| matches(pattern, text))
}

/// Returns whether a text is what a pattern says. Takes no memory, and time in the product of both lengths at most.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to go on if what follows a star does not fit: behind the star, and how far it reaches.
    let mut narrow: Option<(usize, usize)> = None;
    let mut wide: Option<(usize, usize)> = None;
    loop {
        let rest = pattern.get(p..).unwrap_or(&[]);
        if rest.starts_with(b"**") {
            p += 2;
            (wide, narrow) = (Some((p, t)), None);
            continue;
        }
        match (rest.first(), text.get(t)) {
            (None, None) => return true,
            (Some(b'*'), _) => {
                p += 1;
                narrow = Some((p, t));
                continue;
            }
            (Some(b'?'), Some(byte)) if *byte != b'/' => {
                (p, t) = (p + 1, t + 1);
                continue;
            }
            (Some(wanted), Some(byte)) if wanted == byte && *wanted != b'?' => {
                (p, t) = (p + 1, t + 1);
                continue;
            }
            (Some(_), None) if rest == b"/**" => return true,
            _ => {}
        }
        // It does not fit: the nearest star that can takes one byte more.
        if let Some((after, reach)) = narrow
            && text.get(reach).is_some_and(|byte| *byte != b'/')
        {
            narrow = Some((after, reach + 1));
            (p, t) = (after, reach + 1);
        } else if let Some((after, reach)) = wide
            && reach < text.len()
        {
            (wide, narrow) = (Some((after, reach + 1)), None);
            (p, t) = (after, reach + 1);
        } else {
            return false;
        }
    }
}

/// Returns how much of a pattern stands for itself, up to and without the slash before the first star or question
/// mark.
pub fn literal(pattern: &[u8]) -> usize {
    match pattern.iter().position(|byte| matches!(byte, b'*' | b'?')) {
        None => pattern.len(),
        Some(first) => pattern.iter().take(first).rposition(|byte| *byte == b'/').unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fits(pattern: &str, text: &str) -> bool {
        matches(pattern.as_bytes(), text.as_bytes())
    }

    #[test]
    fn stars_stop_at_slashes_and_double_stars_do_not() {
        for (pattern, text, expected) in [
            ("/etc/passwd", "/etc/passwd", true),
            ("/etc/passwd", "/etc/passwd2", false),
            ("/etc/*", "/etc/passwd", true),
            ("/etc/*", "/etc/apt/x", false),
            ("/etc/*", "/etc/", true),
            ("/etc/**", "/etc/apt/x", true),
            ("/etc/**", "/etc", true),
            ("/etc/**", "/etcetera", false),
            ("**/*.so*", "/lib/x/libc.so.6", true),
            ("**/*.so*", "/lib/x.so/readme", false),
            ("**.log", "/a/b.log", true),
            ("/a?c", "/abc", true),
            ("/a?c", "/a/c", false),
            ("/*/b/**/d*", "/a/b/c/c/dd", true),
            ("/*/b/**/d*", "/a/x/b/c/dd", false),
            ("*", "", true),
            ("", "", true),
            ("", "x", false),
            ("/a*b*c", "/axbxbxc", true),
            ("/**x/**y", "/1/2x/3/4y", true),
            ("**", "/anything/at/all", true),
        ] {
            assert_eq!(fits(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn a_question_mark_is_no_literal() {
        assert!(!fits("/?", "/"));
        assert!(fits("/?", "/?"));
    }

    #[test]
    fn one_of_several_is_enough() {
        assert!(any_matches(b"/a\0/b/**", b"/b/c"));
        assert!(!any_matches(b"/a\0/b/**", b"/c"));
    }

    #[test]
    fn literals_end_before_the_first_star() {
        assert_eq!(literal(b"/data/**"), 5);
        assert_eq!(literal(b"/data/a*/b"), 5);
        assert_eq!(literal(b"/data"), 5);
        assert_eq!(literal(b"**/x"), 0);
    }
}
