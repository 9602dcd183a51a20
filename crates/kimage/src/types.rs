//! Where the members of the kernel's structures lie, as the kernel itself describes it (BTF).
//!
//! No version of the kernel is ever asked for: a member is looked up by name, through anonymous structures and unions
//! as C does, and what is absent is an answer too. Lookups are remembered, because walkers repeat them for each object.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use btf_rs::{Btf, BtfType as _, Type};

use crate::error::{Error, Result};

/// Where a member is within its structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Bytes from the structure's beginning.
    pub offset: u64,
    /// Bytes it takes; of a bit-field, the bytes that hold it.
    pub size: u64,
    /// Of a bit-field: how far to shift right, and how many bits count.
    pub bits: Option<(u8, u8)>,
}

/// A structure of a table made by hand: its name, its size, and `(member, offset, size)`s.
pub type TableEntry = (&'static str, u64, &'static [(&'static str, u64, u64)]);

/// The types of a kernel.
pub struct Types {
    btf: Option<Btf>,
    fields: RwLock<HashMap<(&'static str, &'static str), Option<Field>>>,
    sizes: RwLock<HashMap<&'static str, Option<u64>>>,
}

/// The deepest nesting of arrays, typedefs and anonymous members that is followed.
const DEEPEST: usize = 32;

impl Types {
    /// Reads the description that a kernel carries.
    ///
    /// # Errors
    ///
    /// [`Error::NoTypes`] where it is no BTF.
    pub fn from_btf(bytes: &[u8]) -> Result<Self> {
        let btf = Btf::from_bytes(bytes).map_err(|error| Error::NoTypes(error.to_string()))?;
        Ok(Self { btf: Some(btf), fields: RwLock::default(), sizes: RwLock::default() })
    }

    /// Types from a table: for images made by hand.
    #[must_use]
    pub fn from_table(table: &[TableEntry]) -> Self {
        let mut fields = HashMap::new();
        let mut sizes = HashMap::new();
        for &(kind, size, members) in table {
            sizes.insert(kind, Some(size));
            for &(member, offset, size) in members {
                fields.insert((kind, member), Some(Field { offset, size, bits: None }));
            }
        }
        Self { btf: None, fields: RwLock::new(fields), sizes: RwLock::new(sizes) }
    }

    /// Returns where member `path` of structure `kind` is. A path may go through named members: `"thread.fsbase"`.
    ///
    /// # Errors
    ///
    /// [`Error::NoMember`].
    pub fn field(&self, kind: &'static str, path: &'static str) -> Result<Field> {
        let missing = || Error::NoMember { kind: kind.to_owned(), member: path.to_owned() };
        let known = self.fields.read().unwrap_or_else(PoisonError::into_inner).get(&(kind, path)).copied();
        if let Some(known) = known {
            return known.ok_or_else(missing);
        }
        let field = self.btf.as_ref().and_then(|btf| lookup(btf, kind, path));
        self.fields.write().unwrap_or_else(PoisonError::into_inner).insert((kind, path), field);
        field.ok_or_else(missing)
    }

    /// Returns whether structure `kind` has member `path`.
    pub fn has(&self, kind: &'static str, path: &'static str) -> bool {
        self.field(kind, path).is_ok()
    }

    /// The bytes that structure or union `kind` takes.
    ///
    /// # Errors
    ///
    /// [`Error::NoMember`] where there is no such type.
    pub fn size(&self, kind: &'static str) -> Result<u64> {
        let missing = || Error::NoMember { kind: kind.to_owned(), member: String::new() };
        let known = self.sizes.read().unwrap_or_else(PoisonError::into_inner).get(kind).copied();
        if let Some(known) = known {
            return known.ok_or_else(missing);
        }
        let size = self.btf.as_ref().and_then(|btf| size_of(btf, &find(btf, kind)?, 0));
        self.sizes.write().unwrap_or_else(PoisonError::into_inner).insert(kind, size);
        size.ok_or_else(missing)
    }

    /// Returns the value of a constant of enumeration `kind`.
    #[must_use]
    pub fn constant(&self, kind: &str, name: &str) -> Option<u64> {
        let btf = self.btf.as_ref()?;
        btf.resolve_types_by_name(kind).ok()?.iter().find_map(|found| match found {
            Type::Enum(found) => {
                let member = found.members.iter().find(|m| btf.resolve_name(*m).is_ok_and(|n| n == name))?;
                Some(u64::from(member.val()))
            }
            _ => None,
        })
    }
}

/// Returns the structure or union called `kind`, or what a typedef of that name stands for.
fn find(btf: &Btf, kind: &str) -> Option<Type> {
    let all = btf.resolve_types_by_name(kind).ok()?;
    let composite = all.iter().find(|found| matches!(found, Type::Struct(_) | Type::Union(_)));
    composite.or_else(|| all.iter().find(|found| matches!(found, Type::Typedef(_)))).cloned()
}

/// Returns the type behind typedefs and qualifiers.
fn bare(btf: &Btf, id: u32) -> Option<Type> {
    let mut found = btf.resolve_type_by_id(id).ok()?;
    for _ in 0..DEEPEST {
        let next = match &found {
            Type::Typedef(t) => t.get_type_id(),
            Type::Volatile(t) | Type::Const(t) | Type::Restrict(t) => t.get_type_id(),
            Type::TypeTag(t) => t.get_type_id(),
            _ => return Some(found),
        };
        found = btf.resolve_type_by_id(next?).ok()?;
    }
    None
}

fn size_of(btf: &Btf, found: &Type, depth: usize) -> Option<u64> {
    if depth > DEEPEST {
        return None;
    }
    let bytes = match found {
        Type::Ptr(_) => 8,
        Type::Int(int) => int.size(),
        Type::Struct(s) | Type::Union(s) => s.size(),
        Type::Enum(e) => e.size(),
        Type::Enum64(e) => e.size(),
        Type::Float(f) => f.size(),
        Type::Array(array) => {
            let element = size_of(btf, &bare(btf, array.get_type_id()?)?, depth + 1)?;
            return element.checked_mul(array.len() as u64);
        }
        Type::Typedef(t) => return size_of(btf, &bare(btf, t.get_type_id()?)?, depth + 1),
        _ => return None,
    };
    Some(bytes as u64)
}

fn lookup(btf: &Btf, kind: &str, path: &str) -> Option<Field> {
    let mut within = find(btf, kind)?;
    let mut bit_offset = 0_u64;
    let mut steps = path.split('.').peekable();
    while let Some(step) = steps.next() {
        if let Type::Typedef(t) = &within {
            within = bare(btf, t.get_type_id()?)?;
        }
        let (bits_before, bit_width, id) = member(btf, &within, step, 0)?;
        bit_offset += bits_before;
        within = bare(btf, id)?;
        if steps.peek().is_none() {
            let size = size_of(btf, &within, 0)?;
            if let Some(width) = bit_width.filter(|&width| width > 0) {
                let shift = bit_offset % 8;
                let size = (shift + u64::from(width)).div_ceil(8);
                let bits = Some((u8::try_from(shift).ok()?, u8::try_from(width).ok()?));
                return Some(Field { offset: bit_offset / 8, size, bits });
            }
            return Some(Field { offset: bit_offset / 8, size, bits: None });
        }
    }
    None
}

/// A member's place in bits, its width if it is a bit-field, and its type.
fn member(btf: &Btf, within: &Type, name: &str, depth: usize) -> Option<(u64, Option<u32>, u32)> {
    let (Type::Struct(composite) | Type::Union(composite)) = within else { return None };
    if depth > DEEPEST {
        return None;
    }
    for member in &composite.members {
        let here = btf.resolve_name(member).unwrap_or_default();
        let offset = u64::from(member.bit_offset());
        if here == name {
            return Some((offset, member.bitfield_size(), member.get_type_id()?));
        }
        if here.is_empty() {
            let anonymous = bare(btf, member.get_type_id()?)?;
            if let Some((inner, width, id)) = self::member(btf, &anonymous, name, depth + 1) {
                return Some((offset + inner, width, id));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_answers_for_what_it_lists_and_nothing_else() {
        let types = Types::from_table(&[("task_struct", 64, &[("pid", 8, 4)])]);
        assert_eq!(types.field("task_struct", "pid").unwrap(), Field { offset: 8, size: 4, bits: None });
        assert_eq!(types.size("task_struct").unwrap(), 64);
        assert!(!types.has("task_struct", "comm"));
        assert!(types.size("mm_struct").is_err());
    }

    /// The kernel that runs the tests describes itself in the same format.
    #[test]
    fn members_of_the_running_kernel_are_found() {
        let Ok(bytes) = std::fs::read("/sys/kernel/btf/vmlinux") else {
            orrery_testing::skipped!("/sys/kernel/btf/vmlinux is not there");
            return;
        };
        let types = Types::from_btf(&bytes).unwrap();
        assert_eq!(types.field("list_head", "prev").unwrap(), Field { offset: 8, size: 8, bits: None });
        let thread = types.field("task_struct", "thread").unwrap();
        let base = types.field("task_struct", "thread.fsbase").unwrap();
        assert!(base.offset > thread.offset && base.offset < thread.offset + thread.size);
        assert!(types.has("page", "mapping"), "within anonymous unions");
        assert_eq!(types.field("task_struct", "comm").unwrap().size, 16, "an array's bytes are counted");
        let bit = types.field("task_struct", "in_execve").unwrap();
        assert_eq!(bit.bits.map(|(_, width)| width), Some(1));
        assert!(types.size("task_struct").unwrap() > 1000);
        assert!(!types.has("task_struct", "no_such_member"));
        assert_eq!(types.constant("pid_type", "PIDTYPE_PID"), Some(0));
    }

    #[test]
    fn garbage_is_no_btf() {
        assert!(matches!(Types::from_btf(b"garbage and more of it, long enough"), Err(Error::NoTypes(_))));
    }
}
