//! The tree of an image: what the changes of its layers come to, one after another.
//!
//! Paths are resolved as in a root directory: symbolic links of the image lead to other names of the image, never further up than its top.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use orrery_orc_rootfs::Attributes;
use orrery_orc_rootfs::tree::{Entry, Invalid, Kind, MAX_ENTRIES, MAX_PATH, Tree};

use crate::archive::{Change, Names, Put};

/// Symbolic links that are followed for one path, as in the kernel.
const MAX_LINKS: usize = 40;

/// Bytes of all paths of a tree.
const MAX_PATHS: usize = 256 << 20;

/// A change that cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the entry {:?} {reason}", String::from_utf8_lossy(&path.join(&b"/"[..])))]
pub struct BadChange {
    /// The path of the entry.
    pub path: Names,
    /// What is wrong with it.
    pub reason: &'static str,
}

/// What names stand for, names in directories; the first is the top directory.
#[derive(Debug)]
pub struct Image {
    nodes: Vec<Node>,
}

#[derive(Debug)]
struct Node {
    kind: Kind,
    attributes: Attributes,
    /// Of a directory.
    names: BTreeMap<Vec<u8>, usize>,
}

impl Default for Image {
    fn default() -> Self {
        Self { nodes: vec![directory()] }
    }
}

/// A directory that no layer describes.
fn directory() -> Node {
    let attributes = Attributes { mode: 0o755, ..Attributes::default() };
    Node { kind: Kind::Directory, attributes, names: BTreeMap::new() }
}

impl Image {
    /// Makes the changes of the next layer.
    ///
    /// # Errors
    /// [`BadChange`] with the first that cannot be made.
    pub fn apply(&mut self, layer: Vec<Change>) -> Result<(), BadChange> {
        // What is removed is of layers before, wherever the entry stands.
        for change in &layer {
            match change {
                Change::Remove(path) => self.remove(path),
                Change::Empty(path) => {
                    if let Some(directory) = self.find(path) {
                        self.nodes[directory].names.clear();
                    }
                }
                Change::Put { .. } => {}
            }
        }
        for change in layer {
            if let Change::Put { path, kind, attributes } = change {
                let bad = |reason| BadChange { path: path.clone(), reason };
                self.put(&path, kind, attributes).map_err(bad)?;
            }
        }
        Ok(())
    }

    fn remove(&mut self, path: &[Vec<u8>]) {
        let Some((last, parents)) = path.split_last() else { return };
        if let Some(directory) = self.find(parents) {
            self.nodes[directory].names.remove(last);
        }
    }

    fn put(&mut self, path: &[Vec<u8>], put: Put, attributes: Attributes) -> Result<(), &'static str> {
        let Some((last, parents)) = path.split_last() else {
            if put != Put::Node(Kind::Directory) {
                return Err("is the top of the tree, but no directory");
            }
            self.nodes[0].attributes = attributes;
            return Ok(());
        };
        let parent = self.make(parents)?;
        let before = self.nodes[parent].names.get(last).copied();
        let node = match put {
            Put::Link(target) => {
                let (name, parents) = target.split_last().ok_or("is a link to the top of the tree")?;
                let found = self.find(parents).and_then(|directory| self.nodes[directory].names.get(name));
                let found = *found.ok_or("is a link to a file that is not there")?;
                if self.nodes[found].kind == Kind::Directory {
                    return Err("is a link to a directory");
                }
                found
            }
            Put::Node(kind) => {
                let is_directory = |node: &usize| self.nodes[*node].kind == Kind::Directory;
                if let Some(before) = before.filter(|node| kind == Kind::Directory && is_directory(node)) {
                    self.nodes[before].attributes = attributes;
                    return Ok(());
                }
                self.add(Node { kind, attributes, names: BTreeMap::new() })?
            }
        };
        self.nodes[parent].names.insert(last.clone(), node);
        Ok(())
    }

    fn add(&mut self, node: Node) -> Result<usize, &'static str> {
        // Those that were replaced are still there.
        if self.nodes.len() >= 4 * MAX_ENTRIES {
            return Err("is one too many: the layers have more names than a tree can have");
        }
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    /// Returns the directory at a path, if it is there.
    fn find(&self, path: &[Vec<u8>]) -> Option<usize> {
        let mut walk = Walk::new(path);
        while let Some(name) = walk.next() {
            let found = *self.nodes[walk.here()].names.get(&name)?;
            walk.enter(found, &self.nodes[found].kind).ok()?;
        }
        Some(walk.here())
    }

    /// Returns the directory at a path, and makes those that are missing.
    fn make(&mut self, path: &[Vec<u8>]) -> Result<usize, &'static str> {
        let mut walk = Walk::new(path);
        while let Some(name) = walk.next() {
            let here = walk.here();
            let found = match self.nodes[here].names.get(&name) {
                Some(found) => *found,
                None => {
                    let made = self.add(directory())?;
                    self.nodes[here].names.insert(name, made);
                    made
                }
            };
            walk.enter(found, &self.nodes[found].kind)?;
        }
        Ok(walk.here())
    }

    /// Returns the tree.
    ///
    /// # Errors
    /// [`Invalid`] if it cannot be made.
    pub fn into_tree(self) -> Result<Tree, Invalid> {
        let mut entries = Vec::new();
        let mut firsts: HashMap<usize, PathBuf> = HashMap::new();
        let mut waiting = vec![(PathBuf::new(), 0)];
        let mut bytes = 0;
        while let Some((path, index)) = waiting.pop() {
            let node = &self.nodes[index];
            bytes += path.as_os_str().len();
            if path.as_os_str().len() > MAX_PATH || bytes > MAX_PATHS || entries.len() >= MAX_ENTRIES {
                return Err(Invalid { path, reason: "makes the paths of the tree too long" });
            }
            if let Some(first) = firsts.get(&index) {
                let (kind, attributes) = (Kind::Link(first.clone()), Attributes::default());
                entries.push(Entry { path, kind, attributes });
                continue;
            }
            // The first in the order of the entries, as the last in is the first out.
            for (name, child) in node.names.iter().rev() {
                waiting.push((path.join(OsStr::from_bytes(name)), *child));
            }
            if node.kind != Kind::Directory {
                firsts.insert(index, path.clone());
            }
            let (kind, attributes) = (node.kind.clone(), node.attributes.clone());
            entries.push(Entry { path, kind, attributes });
        }
        Tree::new(entries)
    }
}

/// A way through the directories of an image, in which symbolic links are followed.
struct Walk {
    /// The directories from the top to where it is.
    directories: Vec<usize>,
    /// The names that are left, the next one last.
    names: Vec<Vec<u8>>,
    links: usize,
}

impl Walk {
    fn new(path: &[Vec<u8>]) -> Self {
        Self { directories: vec![0], names: path.iter().rev().cloned().collect(), links: 0 }
    }

    fn here(&self) -> usize {
        self.directories.last().copied().unwrap_or(0)
    }

    /// Returns the next name that is looked up.
    fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            match self.names.pop()?.as_slice() {
                b"" | b"." => {}
                b".." => {
                    if self.directories.len() > 1 {
                        self.directories.pop();
                    }
                }
                name => return Some(name.to_vec()),
            }
        }
    }

    /// Goes to what the name stood for.
    fn enter(&mut self, node: usize, kind: &Kind) -> Result<(), &'static str> {
        match kind {
            Kind::Directory => self.directories.push(node),
            Kind::Symlink(target) => {
                self.links += 1;
                if self.links > MAX_LINKS || target.len() > MAX_PATH {
                    return Err("is below too many symbolic links");
                }
                if target.starts_with(b"/") {
                    self.directories.truncate(1);
                }
                self.names.extend(target.split(|byte| *byte == b'/').rev().map(<[u8]>::to_vec));
            }
            _ => return Err("is below what is no directory"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(path: &str) -> Names {
        path.split('/').filter(|name| !name.is_empty()).map(|name| name.as_bytes().to_vec()).collect()
    }

    fn put(path: &str, kind: Kind) -> Change {
        Change::Put { path: names(path), kind: Put::Node(kind), attributes: Attributes::default() }
    }

    fn link(path: &str, target: &str) -> Change {
        let attributes = Attributes::default();
        Change::Put { path: names(path), kind: Put::Link(names(target)), attributes }
    }

    fn symlink(path: &str, target: &str) -> Change {
        put(path, Kind::Symlink(target.as_bytes().to_vec()))
    }

    fn tree(layers: Vec<Vec<Change>>) -> Vec<String> {
        let mut image = Image::default();
        layers.into_iter().for_each(|layer| image.apply(layer).unwrap());
        let tree = image.into_tree().unwrap();
        let show = |entry: &Entry| match &entry.kind {
            Kind::Directory => format!("{}/", entry.path.display()),
            Kind::Link(first) => format!("{} = {}", entry.path.display(), first.display()),
            Kind::Symlink(target) => {
                format!("{} -> {}", entry.path.display(), String::from_utf8_lossy(target))
            }
            _ => entry.path.display().to_string(),
        };
        tree.entries().iter().skip(1).map(show).collect()
    }

    #[test]
    fn layers_add_replace_and_remove() {
        let first = vec![
            put("a/b", Kind::Empty),
            put("a/c", Kind::Empty),
            put("d/e/f", Kind::Empty),
            put("g", Kind::Directory),
            put("g/h", Kind::Empty),
        ];
        assert_eq!(tree(vec![first.clone()]), ["a/", "a/b", "a/c", "d/", "d/e/", "d/e/f", "g/", "g/h"]);
        let second = vec![
            put("a/new", Kind::Empty),
            Change::Remove(names("a/b")),
            // What a layer removes is of layers before, also where it has a file of that name itself.
            put("d/e/new", Kind::Empty),
            Change::Empty(names("d/e")),
            // A file takes the place of a directory with all that is in it.
            put("g", Kind::Empty),
            Change::Remove(names("missing/x")),
        ];
        assert_eq!(tree(vec![first, second]), ["a/", "a/c", "a/new", "d/", "d/e/", "d/e/new", "g"]);
    }

    #[test]
    fn links_lead_to_names_of_the_image_only() {
        let first = vec![
            symlink("up", "../../../../etc"),
            symlink("lib", "usr/lib"),
            symlink("usr/abs", "/usr/lib"),
            put("usr/lib/x", Kind::Empty),
        ];
        let second = vec![
            put("up/passwd", Kind::Empty),
            put("lib/y", Kind::Empty),
            put("usr/abs/z", Kind::Empty),
            link("hard", "lib/x"),
            link("hard2", "up/passwd"),
        ];
        assert_eq!(
            tree(vec![first, second]),
            [
                "etc/",
                "etc/passwd",
                "hard",
                "hard2 = etc/passwd",
                "lib -> usr/lib",
                "up -> ../../../../etc",
                "usr/",
                "usr/abs -> /usr/lib",
                "usr/lib/",
                "usr/lib/x = hard",
                "usr/lib/y",
                "usr/lib/z",
            ]
        );
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (changes, wanted) in [
            (vec![link("a", "b")], "not there"),
            (vec![link("a", "../../etc/passwd")], "not there"),
            (vec![put("d", Kind::Directory), link("a", "d")], "to a directory"),
            (vec![link("a", "")], "to the top"),
            (vec![put("f", Kind::Empty), put("f/x", Kind::Empty)], "no directory"),
            (vec![symlink("l", "l"), put("l/x", Kind::Empty)], "too many symbolic links"),
            (vec![put("", Kind::Empty)], "no directory"),
        ] {
            let error = Image::default().apply(changes.clone()).unwrap_err();
            assert!(error.to_string().contains(wanted), "{changes:?}: {error}");
        }
        let mut image = Image::default();
        image.apply(vec![put("c", Kind::Device { is_block: false, major: 0, minor: 0 })]).unwrap();
        assert!(image.into_tree().is_err());
    }
}
