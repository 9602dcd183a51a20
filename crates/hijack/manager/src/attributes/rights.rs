//! Which classes of which tracees somebody may read and set.

use super::class::{Classes, Permission};
use super::tracee::TraceeId;

/// A set of classes, by their indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClassSet(u64);

impl ClassSet {
    /// The set of all classes.
    pub const ALL: Self = Self(u64::MAX);

    /// Makes the set of these indices; those above 63 are of no class.
    #[must_use]
    pub fn of(indices: impl IntoIterator<Item = usize>) -> Self {
        Self(indices.into_iter().filter(|index| *index < 64).fold(0, |set, index| set | 1 << index))
    }

    /// Returns whether a class is in it.
    #[must_use]
    pub fn has(self, index: usize) -> bool {
        index < 64 && self.0 >> index & 1 == 1
    }

    /// Returns what is in both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// Which tracees a capability is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// All, also those that join later.
    All,
    /// One tracee.
    One(TraceeId),
    /// None: what only emits events and listens to those about nobody.
    None,
}

impl Scope {
    /// Returns whether a tracee is in it.
    #[must_use]
    pub fn has(self, tracee: TraceeId) -> bool {
        match self {
            Self::All => true,
            Self::One(one) => one == tracee,
            Self::None => false,
        }
    }

    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::All, scope) | (scope, Self::All) => scope,
            (Self::One(one), Self::One(other)) if one == other => self,
            _ => Self::None,
        }
    }
}

/// What a capability allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rights {
    /// Of which tracees the attributes may be read.
    pub readable: Scope,
    /// The classes that may be read.
    pub read: ClassSet,
    /// Of which tracees the attributes may be set.
    pub scope: Scope,
    /// The classes that may be written.
    pub write: ClassSet,
    /// Whether events may be received.
    pub subscribe: bool,
    /// Whether events may be emitted.
    pub emit: bool,
    /// Whether capabilities may be derived from it.
    pub delegate: bool,
    /// Whether extensions may be loaded that act with it.
    pub load: bool,
}

impl Rights {
    /// The manager's own.
    pub const ALL: Self = Self {
        readable: Scope::All,
        read: ClassSet::ALL,
        scope: Scope::All,
        write: ClassSet::ALL,
        subscribe: true,
        emit: true,
        delegate: true,
        load: true,
    };

    /// Returns what both allow: what is derived never has more than what it is derived from.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            readable: self.readable.and(other.readable),
            read: self.read.and(other.read),
            scope: self.scope.and(other.scope),
            write: self.write.and(other.write),
            subscribe: self.subscribe && other.subscribe,
            emit: self.emit && other.emit,
            delegate: self.delegate && other.delegate,
            load: self.load && other.load,
        }
    }

    /// Returns what user `uid` may have, who is the user of `tracee` if there is one; `manager` is the user who runs the manager.
    #[must_use]
    pub fn of_user(classes: &Classes, uid: u32, manager: u32, tracee: Option<TraceeId>) -> Self {
        let all = |permission: Permission, owner: Option<u32>| {
            uid == 0 || uid == owner.unwrap_or(manager) || permission == Permission::All
        };
        let set = |allowed: &dyn Fn(usize) -> bool| {
            ClassSet::of((0..classes.all().len()).filter(|index| allowed(*index)))
        };
        let class = |index: usize| &classes.all()[index];
        let privileged = uid == 0 || uid == manager;
        // A user who may do something to all tracees has one scope for it, and so no narrower one beside it.
        let (scope, write) = match tracee {
            Some(tracee) => {
                let write = set(&|index| {
                    class(index).write == Permission::Tracee || all(class(index).write, class(index).owner)
                });
                (Scope::One(tracee), write)
            }
            None => {
                let write = set(&|index| all(class(index).write, class(index).owner));
                (if write == ClassSet::default() { Scope::None } else { Scope::All }, write)
            }
        };
        let (readable, read) = match tracee {
            Some(tracee) if !privileged => {
                let read = set(&|index| {
                    class(index).read != Permission::Owner || all(class(index).read, class(index).owner)
                });
                (Scope::One(tracee), read)
            }
            _ => (Scope::All, set(&|index| all(class(index).read, class(index).owner))),
        };
        Self {
            readable,
            read,
            scope,
            write,
            subscribe: true,
            emit: privileged || tracee.is_some(),
            delegate: true,
            load: true,
        }
    }
}
