//! Handles: the numbers by which a module names the rights that it was granted.
//!
//! A handle is an index and a tag. Indices count from 0, in the manifest's order; the tag belongs to one grant, and a new grant
//! at the same index gets another. A number with another tag or index was never granted: using it is an error in the module,
//! or an attack, and aborts the run. A handle that *was* granted and is revoked fails with `GONE`: its user has done nothing wrong.
//!
//! The tag is a protection against mistakes, not a secret: whatever number a module makes up, it reaches only what this very
//! extension was granted. That is what looking up a handle in the table guarantees.

use std::collections::VecDeque;

bitflags::bitflags! {
    /// What a handle may be used for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Rights: u8 {
        /// `get_attribute`.
        const GET = 1;
        /// `set_attribute`.
        const SET = 2;
        /// `subscribe`.
        const SUBSCRIBE = 4;
        /// `emit`.
        const EMIT = 8;
    }
}

/// A handle as the module has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle(u32);

impl Handle {
    const INDEX_BITS: u32 = 8;
    /// How many handles an extension may have.
    pub const MOST: usize = 1 << Self::INDEX_BITS;

    fn new(index: u32, tag: u32) -> Self {
        Self(tag << Self::INDEX_BITS | index)
    }

    fn index(self) -> usize {
        // Eight bits.
        (self.0 & ((1 << Self::INDEX_BITS) - 1)) as usize
    }

    fn tag(self) -> u32 {
        self.0 >> Self::INDEX_BITS
    }

    /// Returns the handle that a module passed.
    pub(crate) fn from_module(number: i32) -> Self {
        Self(number.cast_unsigned())
    }

    /// Returns the number that the module gets.
    pub(crate) fn to_module(self) -> i32 {
        self.0.cast_signed()
    }

    /// Returns the number.
    pub fn number(self) -> u32 {
        self.0
    }
}

/// A right: what for, and to what.
#[derive(Clone, Debug)]
pub struct Grant<C> {
    /// What the handle may be used for.
    pub rights: Rights,
    /// What it stands for.
    pub capability: C,
}

/// What a look-up finds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found<'a, C> {
    /// The right.
    Granted(&'a C),
    /// The handle is valid, but not for this.
    Denied,
    /// The handle was revoked.
    Revoked,
    /// It was never granted.
    Forged,
}

/// How many revoked handles an index remembers. One that was revoked earlier counts as forged.
const REMEMBERED: usize = 8;

#[derive(Debug)]
struct Slot<C> {
    name: String,
    tag: u32,
    grant: Option<Grant<C>>,
    revoked: VecDeque<u32>,
}

/// The handles of one extension.
#[derive(Debug)]
pub(crate) struct Table<C> {
    slots: Vec<Slot<C>>,
    next_tag: u32,
}

impl<C> Table<C> {
    /// The tag of the first grant: so that small numbers, which a module may have by mistake, are no handles.
    const FIRST_TAG: u32 = 0x5a_0000;
    const TAGS: u32 = 1 << (u32::BITS - Handle::INDEX_BITS);

    pub(crate) fn new() -> Self {
        Self { slots: Vec::new(), next_tag: Self::FIRST_TAG }
    }

    fn tag(&mut self) -> u32 {
        let tag = self.next_tag;
        self.next_tag = (tag + 1) % Self::TAGS;
        tag
    }

    /// Grants a right under a name; one that had this name before is revoked. Returns nothing where there is no more room.
    pub(crate) fn grant(&mut self, name: &str, grant: Grant<C>) -> Option<Handle> {
        let index = match self.slots.iter().position(|slot| slot.name == name) {
            Some(index) => index,
            None if self.slots.len() < Handle::MOST => {
                let slot = Slot { name: name.to_owned(), tag: 0, grant: None, revoked: VecDeque::new() };
                self.slots.push(slot);
                self.slots.len() - 1
            }
            None => return None,
        };
        let tag = self.tag();
        let slot = &mut self.slots[index];
        slot.revoke();
        slot.tag = tag;
        slot.grant = Some(grant);
        Some(Handle::new(u32::try_from(index).ok()?, tag))
    }

    /// Revokes what the name stands for; returns whether it stood for anything.
    pub(crate) fn revoke(&mut self, name: &str) -> bool {
        self.slots.iter_mut().find(|slot| slot.name == name).is_some_and(Slot::revoke)
    }

    /// Returns the handle of a name, also of one that was revoked.
    pub(crate) fn named(&self, name: &str) -> Option<Handle> {
        let index = self.slots.iter().position(|slot| slot.name == name)?;
        Some(Handle::new(u32::try_from(index).ok()?, self.slots[index].tag))
    }

    /// Returns what a handle stands for, if it has all of `rights`.
    pub(crate) fn look_up(&self, handle: Handle, rights: Rights) -> Found<'_, C> {
        let Some(slot) = self.slots.get(handle.index()) else { return Found::Forged };
        match &slot.grant {
            Some(grant) if slot.tag == handle.tag() => {
                if grant.rights.contains(rights) {
                    Found::Granted(&grant.capability)
                } else {
                    Found::Denied
                }
            }
            _ if slot.revoked.contains(&handle.tag()) => Found::Revoked,
            _ => Found::Forged,
        }
    }
}

impl<C> Slot<C> {
    fn revoke(&mut self) -> bool {
        if self.grant.take().is_none() {
            return false;
        }
        if self.revoked.len() == REMEMBERED {
            self.revoked.pop_front();
        }
        self.revoked.push_back(self.tag);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Grant(u8, Rights),
        Revoke(u8),
        Use(u32, Rights),
        UseKnown(prop::sample::Index, Rights),
    }

    fn rights() -> impl Strategy<Value = Rights> {
        any::<u8>().prop_map(Rights::from_bits_truncate)
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..6_u8, rights()).prop_map(|(name, rights)| Step::Grant(name, rights)),
            (0..6_u8).prop_map(Step::Revoke),
            (any::<u32>(), rights()).prop_map(|(number, rights)| Step::Use(number, rights)),
            (any::<prop::sample::Index>(), rights())
                .prop_map(|(index, rights)| Step::UseKnown(index, rights)),
        ]
    }

    proptest! {
        /// A number reaches a capability exactly if it was returned by a grant that is still in force and has the rights.
        #[test]
        fn a_number_reaches_only_what_was_granted(steps in prop::collection::vec(step(), 1..60)) {
            let mut table = Table::new();
            // The model: for each number ever returned its name and rights, and the number in force for each name.
            let mut known: Vec<(u32, u8, Rights, usize)> = Vec::new();
            let mut live: HashMap<u8, u32> = HashMap::new();
            for (serial, step) in steps.into_iter().enumerate() {
                let (number, wanted) = match step {
                    Step::Grant(name, rights) => {
                        let grant = Grant { rights, capability: serial };
                        let handle = table.grant(&name.to_string(), grant).unwrap().number();
                        prop_assert!(!known.iter().any(|entry| entry.0 == handle), "a number is returned once");
                        known.push((handle, name, rights, serial));
                        live.insert(name, handle);
                        continue;
                    }
                    Step::Revoke(name) => {
                        prop_assert_eq!(table.revoke(&name.to_string()), live.remove(&name).is_some());
                        continue;
                    }
                    Step::Use(number, wanted) => (number, wanted),
                    Step::UseKnown(index, wanted) if !known.is_empty() => (index.get(&known).0, wanted),
                    Step::UseKnown(..) => continue,
                };
                let entry = known.iter().find(|entry| entry.0 == number);
                let found = table.look_up(Handle(number), wanted);
                match entry {
                    None => prop_assert_eq!(found, Found::Forged),
                    Some((_, name, rights, serial)) if live.get(name) == Some(&number) => {
                        let expected = if rights.contains(wanted) { Found::Granted(serial) } else { Found::Denied };
                        prop_assert_eq!(found, expected);
                    }
                    Some(_) => prop_assert!(matches!(found, Found::Revoked | Found::Forged)),
                }
            }
        }
    }

    #[test]
    fn there_is_room_for_256_handles() {
        let mut table = Table::new();
        let grant = || Grant { rights: Rights::GET, capability: () };
        for index in 0..Handle::MOST {
            assert!(table.grant(&index.to_string(), grant()).is_some());
        }
        assert!(table.grant("one more", grant()).is_none());
        assert!(table.grant("7", grant()).is_some(), "a name is granted again in its place");
    }
}
