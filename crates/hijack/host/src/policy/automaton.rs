//! Compiles the path patterns of a table's rules to one automaton: see `orrery_hijack_image::automaton`.
//!
//! A set of places in patterns is a state: those that a path may have reached. It grows with the number of patterns, and for
//! stars behind stars faster than that, so there are limits; a policy beyond them is asked pattern by pattern.

use std::collections::{BTreeSet, HashMap};

use orrery_hijack_image::automaton::{DEAD, Head, LARGEST, LISTS, START};
use orrery_hijack_image::glob::SEPARATOR;

/// A piece of a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece {
    /// This byte.
    Byte(u8),
    /// Any but a slash: `?`.
    One,
    /// Any number of those: `*`.
    Some,
    /// Any number of any: `**`.
    All,
}

/// One pattern, and the list that it belongs to.
struct Pattern {
    pieces: Vec<Piece>,
    list: usize,
}

/// A place: the number of a pattern, and how many of its pieces are behind it.
type At = (usize, usize);
/// All places that a path may have reached.
type Places = BTreeSet<At>;

fn pieces(pattern: &[u8]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut rest = pattern;
    while let Some((first, behind)) = rest.split_first() {
        (rest, _) = match first {
            b'*' if behind.first() == Some(&b'*') => {
                (behind.get(1..).unwrap_or(&[]), pieces.push(Piece::All))
            }
            b'*' => (behind, pieces.push(Piece::Some)),
            b'?' => (behind, pieces.push(Piece::One)),
            byte => (behind, pieces.push(Piece::Byte(*byte))),
        };
    }
    pieces
}

impl Pattern {
    /// Adds a place, and those that can be reached from it without reading.
    fn enter(&self, number: usize, mut at: usize, places: &mut Places) {
        while places.insert((number, at)) && matches!(self.pieces.get(at), Some(Piece::Some | Piece::All)) {
            at += 1;
        }
    }

    /// Returns where a byte leads to from a place.
    fn step(&self, at: usize, byte: u8) -> Option<usize> {
        match *self.pieces.get(at)? {
            Piece::Byte(wanted) => (wanted == byte).then_some(at + 1),
            Piece::One => (byte != b'/').then_some(at + 1),
            Piece::Some => (byte != b'/').then_some(at),
            Piece::All => Some(at),
        }
    }

    /// Returns whether a path that ends there fits: `/dir/**` is `/dir`, too.
    fn fits(&self, at: usize) -> bool {
        matches!(self.pieces.get(at..), Some([] | [Piece::Byte(b'/'), Piece::All]))
    }
}

/// Returns the automaton of some lists of patterns, with separators between them. `None` where there are no lists,
/// too many, or where it would be too large.
pub(super) fn compile(lists: &[&[u8]]) -> Option<Vec<u8>> {
    if lists.is_empty() || lists.len() > LISTS {
        return None;
    }
    let of_list = |(list, patterns): (usize, &&[u8])| {
        let each = patterns.split(|byte| *byte == SEPARATOR);
        each.map(|pattern| Pattern { pieces: pieces(pattern), list }).collect::<Vec<_>>()
    };
    let patterns: Vec<Pattern> = lists.iter().enumerate().flat_map(of_list).collect();
    let (class_of, samples) = classes(&patterns);

    let mut start = Places::new();
    for (number, pattern) in patterns.iter().enumerate() {
        pattern.enter(number, 0, &mut start);
    }
    // The dead state has no places.
    let mut states = vec![Places::new(), start.clone()];
    let mut known = HashMap::from([(Places::new(), DEAD), (start, START)]);
    let mut next: Vec<u16> = Vec::new();
    let mut done = 0;
    while let Some(places) = states.get(done).cloned() {
        done += 1;
        for byte in &samples {
            let mut reached = Places::new();
            for (number, at) in &places {
                if let Some(pattern) = patterns.get(*number)
                    && let Some(at) = pattern.step(*at, *byte)
                {
                    pattern.enter(*number, at, &mut reached);
                }
            }
            let state = match known.get(&reached) {
                Some(state) => *state,
                None => {
                    let state = u16::try_from(states.len()).ok()?;
                    states.push(reached.clone());
                    known.insert(reached, state);
                    state
                }
            };
            next.push(state);
        }
        if size_of::<Head>() + states.len() * (8 + 2 * samples.len()) > LARGEST {
            return None;
        }
    }
    let fits = states.iter().map(|places| {
        let ends =
            places.iter().filter_map(|(number, at)| patterns.get(*number).map(|pattern| (pattern, at)));
        ends.filter(|(pattern, at)| pattern.fits(**at))
            .fold(0_u64, |bits, (pattern, _)| bits | 1 << pattern.list)
    });
    let mut bytes = Vec::new();
    bytes.extend(u32::try_from(states.len()).ok()?.to_ne_bytes());
    bytes.extend(u32::try_from(samples.len()).ok()?.to_ne_bytes());
    bytes.extend(class_of);
    bytes.extend(fits.flat_map(u64::to_ne_bytes));
    bytes.extend(next.into_iter().flat_map(u16::to_ne_bytes));
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    Some(bytes)
}

/// To which class each byte belongs, and one byte of each class: bytes that no pattern names are alike, but for the slash.
fn classes(patterns: &[Pattern]) -> ([u8; 256], Vec<u8>) {
    let mut named = [false; 256];
    named[usize::from(b'/')] = true;
    for piece in patterns.iter().flat_map(|pattern| &pattern.pieces) {
        if let Piece::Byte(byte) = piece {
            named[usize::from(*byte)] = true;
        }
    }
    let (mut class_of, mut samples) = ([0; 256], Vec::new());
    let mut other = None;
    for byte in 0..=u8::MAX {
        let index = u8::try_from(samples.len()).unwrap_or(u8::MAX);
        let class = if named[usize::from(byte)] { index } else { *other.get_or_insert(index) };
        if class == index {
            samples.push(byte);
        }
        class_of[usize::from(byte)] = class;
    }
    (class_of, samples)
}

#[cfg(test)]
mod tests {
    use orrery_hijack_image::automaton::{Automaton, Progress, Walk};
    use orrery_hijack_image::glob;
    use proptest::prelude::*;

    use super::*;

    /// An automaton's words.
    struct Compiled(Vec<u64>);

    impl Compiled {
        fn of(lists: &[&[u8]]) -> Option<Self> {
            let bytes = compile(lists)?;
            Some(Self(bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()))
        }

        /// As many of these patterns as go into one automaton, beginning with the first.
        fn of_what_fits(mut lists: Vec<Vec<String>>) -> (Vec<Vec<u8>>, Self) {
            loop {
                let joined: Vec<Vec<u8>> = lists.iter().map(|list| list.join("\0").into_bytes()).collect();
                let borrowed: Vec<&[u8]> = joined.iter().map(Vec::as_slice).collect();
                if let Some(compiled) = Self::of(&borrowed) {
                    return (joined, compiled);
                }
                lists.last_mut().unwrap().pop();
                if lists.last().unwrap().is_empty() {
                    lists.pop();
                }
            }
        }

        fn automaton(&self) -> Automaton<'_> {
            Automaton::new(&self.0).unwrap()
        }

        /// Leads a path through, in pieces of a length; `None` where it goes upwards.
        fn walk(&self, directory: Option<&str>, path: &str, length: usize) -> Option<u64> {
            let automaton = self.automaton();
            let mut walk = match directory {
                Some(directory) => Walk::from(automaton, directory.as_bytes()),
                None => Walk::from_root(automaton),
            };
            let bytes = [path.as_bytes(), &[0]].concat();
            for piece in bytes.chunks(length) {
                match walk.feed(piece) {
                    Progress::More => {}
                    Progress::Fits(fits) => return Some(fits),
                    Progress::Upwards => return None,
                }
            }
            panic!("the path has no end")
        }
    }

    /// The path from the root, without dots, as the slow way makes it; `None` where it goes upwards.
    fn normal(directory: &str, path: &str) -> Option<String> {
        let names = directory.split('/').chain(path.split('/'));
        let names: Vec<&str> = names.filter(|name| !name.is_empty() && *name != ".").collect();
        (!path.split('/').any(|name| name == "..")).then(|| format!("/{}", names.join("/")))
    }

    fn slow(lists: &[&[u8]], path: &str) -> u64 {
        let fits = |(_, list): &(usize, &&[u8])| glob::any_matches(list, path.as_bytes());
        lists.iter().enumerate().filter(fits).fold(0, |bits, (list, _)| bits | 1 << list)
    }

    #[test]
    fn states_say_which_lists_fit() {
        let lists: [&[u8]; 3] = [b"/etc/passwd\0/root/**", b"**/*.so*", b"/etc/*"];
        let compiled = Compiled::of(&lists).unwrap();
        for (path, expected) in [
            ("/etc/passwd", 0b101),
            ("/root", 0b001),
            ("/root/x/y.so", 0b011),
            ("/lib/x/libc.so.6", 0b010),
            ("/etc/./passwd/", 0b101),
            ("/etc/", 0),
            ("/", 0),
            ("/etc/apt/x", 0),
            ("//etc///hosts/.", 0b100),
        ] {
            assert_eq!(compiled.walk(None, &path[1..], 100), Some(expected), "{path}");
        }
        assert_eq!(compiled.walk(Some("/etc"), "passwd", 100), Some(0b101));
        assert_eq!(compiled.walk(Some("/"), "etc/passwd", 100), Some(0b101));
        assert_eq!(compiled.walk(None, "usr/../etc/passwd", 100), None);
        assert_eq!(compiled.walk(None, "etc/passwd/..", 100), None);
    }

    #[test]
    fn what_would_be_too_large_is_none() {
        assert!(compile(&[]).is_none());
        assert!(compile(&vec![b"/x".as_slice(); LISTS + 1]).is_none());
        // Which of the last twenty bytes were an a.
        assert!(compile(&[b"/*a???????????????????"]).is_none());
    }

    fn patterns() -> impl Strategy<Value = String> {
        prop::collection::vec(
            prop::sample::select(vec!["a", "b", ".", "/", "/", "*", "**", "?", "/**"]),
            0..9,
        )
        .prop_map(|pieces| pieces.concat())
    }

    fn paths() -> impl Strategy<Value = String> {
        prop::collection::vec(
            prop::sample::select(vec![
                "a",
                "b",
                ".",
                "..",
                "/",
                "/",
                "//",
                "/./",
                "c",
                "aabbcab.bca.bacbbaacab",
            ]),
            0..9,
        )
        .prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        /// The property that makes the fast decision the slow one, over random rules and paths.
        #[test]
        fn walks_decide_as_patterns_do(
            lists in prop::collection::vec(prop::collection::vec(patterns(), 1..3), 1..5),
            directory in prop::option::of(prop::sample::select(vec!["/", "/a", "/a/b", "/b.c"])),
            path in paths(),
            length in 1_usize..40,
        ) {
            let (lists, compiled) = Compiled::of_what_fits(lists);
            let lists: Vec<&[u8]> = lists.iter().map(Vec::as_slice).collect();
            match (compiled.walk(directory, &path, length), normal(directory.unwrap_or("/"), &path)) {
                (Some(fits), Some(path)) => prop_assert_eq!(fits, slow(&lists, &path), "{}", path),
                (Some(_), None) => prop_assert!(false, "a way upwards was not seen"),
                // Two dots within a name may be taken for a way upwards.
                (None, _) => prop_assert!(path.contains("..")),
            }
        }
    }
}
