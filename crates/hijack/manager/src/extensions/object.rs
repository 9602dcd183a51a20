//! What an extension's handle stands for.

use orrery_extension::{Refusal, Request, Rights};

use crate::attributes::{Classes, Topic};

/// Topics, by the names that manifests have for them.
pub(super) const TOPICS: [(&str, Topic); 10] = [
    ("timer", Topic::Timer),
    ("joined", Topic::Joined),
    ("ended", Topic::Ended),
    ("call", Topic::Call),
    ("attribute", Topic::Attribute),
    ("missed", Topic::Missed),
    ("cpu-pressure", Topic::CpuPressure),
    ("memory-pressure", Topic::MemoryPressure),
    ("signal", Topic::Signal),
    ("custom", Topic::Custom),
];

/// What a handle stands for. Tracees are meant by name: they come and go while the extension stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Object {
    /// An attribute of a tracee.
    Attribute { class: String, of: String },
    /// Events, of a tracee or all.
    Source { topic: Topic, of: Option<String> },
    /// The function that a tracee registered for upcalls.
    Upcall { of: String },
    /// Where events are emitted.
    Event { of: Option<String> },
    /// The manager's log.
    Owner,
}

impl Object {
    /// Returns what a manifest asks for.
    pub(super) fn of(request: &Request, classes: &Classes) -> Result<Self, Refusal> {
        let topic = TOPICS.iter().find(|(name, _)| *name == request.to);
        let (object, possible) = match (request.to.as_str(), topic, &request.of) {
            (_, Some((_, topic)), of) => (Self::Source { topic: *topic, of: of.clone() }, Rights::SUBSCRIBE),
            ("event", _, of) => (Self::Event { of: of.clone() }, Rights::EMIT),
            ("upcall", _, Some(of)) => (Self::Upcall { of: of.clone() }, Rights::EMIT),
            ("owner", _, None) => (Self::Owner, Rights::EMIT),
            (class, _, Some(of)) if classes.named(class).is_ok() => {
                let object = Self::Attribute { class: class.to_owned(), of: of.clone() };
                (object, Rights::GET | Rights::SET)
            }
            _ => return Err(Refusal::Invalid),
        };
        if possible.contains(request.rights) { Ok(object) } else { Err(Refusal::Denied) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_has_the_rights_of_its_kind_only() {
        let classes = Classes::own().unwrap();
        let of = |to: &str, of: Option<&str>, rights| {
            Object::of(&Request { to: to.to_owned(), of: of.map(str::to_owned), rights }, &classes)
        };
        assert!(of("cpu.target", Some("a"), Rights::GET | Rights::SET).is_ok());
        assert_eq!(of("cpu.target", Some("a"), Rights::EMIT), Err(Refusal::Denied));
        assert_eq!(of("cpu.target", None, Rights::GET), Err(Refusal::Invalid));
        assert_eq!(of("cpu.unheard", Some("a"), Rights::GET), Err(Refusal::Invalid));
        assert!(of("timer", None, Rights::SUBSCRIBE).is_ok());
        assert_eq!(of("timer", None, Rights::SUBSCRIBE | Rights::SET), Err(Refusal::Denied));
        assert_eq!(of("owner", Some("a"), Rights::EMIT), Err(Refusal::Invalid));
        assert_eq!(of("upcall", Some("a"), Rights::EMIT), Ok(Object::Upcall { of: "a".to_owned() }));
        assert_eq!(of("upcall", Some("a"), Rights::EMIT | Rights::SET), Err(Refusal::Denied));
        assert_eq!(of("upcall", None, Rights::EMIT), Err(Refusal::Invalid));
        assert_eq!(of("event", Some("a"), Rights::EMIT), Ok(Object::Event { of: Some("a".to_owned()) }));
    }
}
