//! Tests of the table, among them a random one against a simple model.

use proptest::prelude::*;

use super::*;
use crate::attributes::{Admission, ClassSet};

const CLASSES: &str = "
[[class]]
name = 'a'
kind = 'integer'
range = [1, 100]
default = 0
sum = 150

[[class]]
name = 'b'
kind = 'integer'
range = [0, 10]
";

fn table() -> (Table, Capability) {
    let classes = Classes::own().unwrap().with(CLASSES, "test").unwrap();
    let mut table = Table::new(classes);
    let all = table.grant(Rights::ALL).unwrap();
    (table, all)
}

fn only(table: &Table, tracee: TraceeId, read: &[&str], write: &[&str]) -> Rights {
    let set = |names: &[&str]| ClassSet::of(names.iter().filter_map(|name| table.classes().index(name)));
    let scope = Scope::One(tracee);
    Rights { readable: scope, read: set(read), scope, write: set(write), ..Rights::ALL }
}

#[test]
fn values_are_set_within_their_range_all_or_none() {
    let (mut table, all) = table();
    let one = table.add_tracee().unwrap();
    table.set(&all, one, &[("a", 5), ("b", 7)]).unwrap();
    let error = table.set(&all, one, &[("a", 6), ("b", 11)]).unwrap_err();
    assert_eq!(error.to_string(), "cannot set b to 11: the range is 0 to 10");
    assert_eq!((table.get(&all, one, "a"), table.get(&all, one, "b")), (Ok(5), Ok(7)));
    // 0 is below the range, and the default: nothing reserved.
    table.set(&all, one, &[("a", 0)]).unwrap();
    assert_eq!(table.take_changes().len(), 3);
    assert!(table.take_changes().is_empty());
}

#[test]
fn sums_are_bounded_over_all_tracees() {
    let (mut table, all) = table();
    let [one, two] = [(); 2].map(|()| table.add_tracee().unwrap());
    table.set(&all, one, &[("a", 100)]).unwrap();
    let error = table.set(&all, two, &[("a", 51)]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot set a to 51: the sum over all tracees would be 151; the bound is 150"
    );
    table.set(&all, two, &[("a", 50)]).unwrap();
    table.set(&all, two, &[("a", 40)]).unwrap();
    table.remove_tracee(one);
    table.set(&all, two, &[("a", 100)]).unwrap();
}

#[test]
fn capabilities_allow_what_they_say_and_no_more() {
    let (mut table, all) = table();
    let [one, two] = [(); 2].map(|()| table.add_tracee().unwrap());
    let rights = only(&table, one, &["a", "b"], &["a"]);
    let mine = table.derive(&all, rights).unwrap();
    table.set(&mine, one, &[("a", 1)]).unwrap();
    for (tracee, class) in [(two, "a"), (one, "b")] {
        let error = table.set(&mine, tracee, &[(class, 1)]).unwrap_err();
        assert!(matches!(error, AttributeError::Denied { operation: "set", .. }), "{error}");
    }
    assert_eq!(table.get(&mine, one, "b"), Ok(0));
    assert!(matches!(table.get(&mine, two, "a"), Err(AttributeError::Denied { operation: "read", .. })));
    // More is not to be had by deriving.
    let more = table.derive(&mine, Rights::ALL).unwrap();
    assert_eq!(table.rights(&more), table.rights(&mine));
    let none = table.derive(&mine, Rights { delegate: false, ..Rights::ALL }).unwrap();
    assert!(matches!(
        table.derive(&none, Rights::ALL),
        Err(AttributeError::Denied { operation: "delegate", .. })
    ));
    assert!(table.emit(&mine, Some(two), 1, 1).is_err());
}

#[test]
fn revoking_ends_what_was_derived() {
    let (mut table, all) = table();
    let one = table.add_tracee().unwrap();
    let first = table.derive(&all, Rights::ALL).unwrap();
    let second = table.derive(&first, Rights::ALL).unwrap();
    let other = table.derive(&all, Rights::ALL).unwrap();
    let heard = table.subscribe(&second, &[Topic::Custom], 4).unwrap();
    table.revoke(&first);
    table.emit(&other, None, 1, 1).unwrap();
    assert_eq!(table.next_event(&heard), None);
    for gone in [&first, &second] {
        assert_eq!(table.get(gone, one, "a"), Err(AttributeError::Revoked));
        assert_eq!(table.set(gone, one, &[("a", 1)]), Err(AttributeError::Revoked));
        assert!(table.subscribe(gone, &[], 1).is_err() && table.derive(gone, Rights::ALL).is_err());
    }
    assert_eq!(table.get(&other, one, "a"), Ok(0));
    // Those about a tracee end with it.
    let about = only(&table, one, &["a"], &["a"]);
    let about = table.derive(&all, about).unwrap();
    table.remove_tracee(one);
    assert_eq!(table.rights(&about), Err(AttributeError::Revoked));
    assert_eq!(table.get(&all, one, "a"), Err(AttributeError::UnknownTracee(one.0)));
}

#[test]
fn another_tables_capabilities_are_none_here() {
    let ((mut table, all), (mut other, theirs)) = (table(), table());
    let (one, _) = (table.add_tracee().unwrap(), other.add_tracee().unwrap());
    assert_eq!(table.get(&theirs, one, "a"), Err(AttributeError::Revoked));
    table.revoke(&theirs);
    let heard = other.subscribe(&theirs, &[Topic::Custom], 1).unwrap();
    table.emit(&all, None, 1, 1).unwrap();
    assert_eq!(table.next_event(&heard), None);
    assert_eq!(table.get(&all, one, "a"), Ok(0));
}

#[test]
fn queues_are_bounded_and_count_what_they_drop() {
    let (mut table, all) = table();
    let heard = table.subscribe(&all, &[Topic::Custom, Topic::Attribute], 10).unwrap();
    for value in 0..1_000_000 {
        table.emit(&all, None, 3, value).unwrap();
    }
    assert_eq!(table.dropped(&heard), 999_990);
    let values: Vec<_> = std::iter::from_fn(|| table.next_event(&heard)).map(|event| event.value).collect();
    assert_eq!(values, (0..10).collect::<Vec<_>>());
    let one = table.add_tracee().unwrap();
    table.set(&all, one, &[("b", 3)]).unwrap();
    let event = table.next_event(&heard).unwrap();
    assert_eq!((event.topic, event.tracee, event.value), (Topic::Attribute, Some(one), 3));
}

#[test]
fn tables_do_not_grow_without_bound() {
    let (mut table, all) = table();
    let full = |made: usize, most: usize| assert_eq!(made, most);
    full((0..5000).filter(|_| table.add_tracee().is_ok()).count(), MOST_TRACEES);
    full((0..2000).filter(|_| table.subscribe(&all, &[], 1).is_ok()).count(), MOST_SUBSCRIPTIONS);
    full((0..20_000).filter(|_| table.derive(&all, Rights::ALL).is_ok()).count(), MOST_CAPABILITIES - 1);
}

struct Even(usize);

impl Guard for Even {
    fn classes(&self) -> Vec<usize> {
        vec![self.0]
    }

    fn admit(&self, proposal: &Proposal<'_>) -> Admission {
        if proposal.own(self.0) % 2 == 0 { Ok(()) } else { Err("it is odd".to_owned()) }
    }
}

#[test]
fn guards_refuse_with_a_reason() {
    let (mut table, all) = table();
    let class = table.classes().index("b").unwrap();
    table.add_guard(Box::new(Even(class)));
    let one = table.add_tracee().unwrap();
    let error = table.set(&all, one, &[("b", 3), ("a", 2)]).unwrap_err();
    assert_eq!(error.to_string(), "cannot reserve b = 3: it is odd");
    assert_eq!(table.get(&all, one, "a"), Ok(0));
    table.set(&all, one, &[("b", 4), ("a", 3)]).unwrap();
}

#[test]
fn users_get_what_classes_permit() {
    let classes = Classes::own().unwrap();
    let index = |name: &str| classes.index(name).unwrap();
    let tracee = TraceeId(9);
    let user = Rights::of_user(&classes, 1000, 0, Some(tracee));
    assert_eq!((user.scope, user.readable), (Scope::One(tracee), Scope::One(tracee)));
    assert!(user.write.has(index("cpu.target")) && !user.write.has(index("cpu.missed")));
    assert!(user.read.has(index("cpu.missed")));
    let stranger = Rights::of_user(&classes, 1000, 0, None);
    assert_eq!((stranger.scope, stranger.emit), (Scope::None, false));
    assert_eq!(stranger.readable, Scope::All);
    let root = Rights::of_user(&classes, 0, 1000, None);
    assert!(root.scope == Scope::All && root.write.has(index("cpu.missed")));
}

#[derive(Debug, Clone)]
enum Step {
    Add,
    Remove(usize),
    Set(usize, usize, i64),
    Derive(usize, u64),
    Revoke(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        Just(Step::Add),
        (0..8_usize).prop_map(Step::Remove),
        (0..8_usize, 0..8_usize, -3..120_i64).prop_map(|(by, of, value)| Step::Set(by, of, value)),
        (0..8_usize, any::<u64>()).prop_map(|(from, bits)| Step::Derive(from, bits)),
        (0..8_usize).prop_map(Step::Revoke),
    ]
}

proptest! {
    /// In any order of steps values stay within range and sum, and only valid capabilities with the right set them.
    #[test]
    fn the_table_does_as_the_model_says(steps in prop::collection::vec(step(), 1..60)) {
        let (mut table, all) = table();
        let a = table.classes().index("a").unwrap();
        let mut tracees: Vec<(TraceeId, i64)> = Vec::new();
        // A capability, whether it may set "a", its parent, and whether it is valid.
        let mut held: Vec<(Capability, bool, usize, bool)> = vec![(all, true, usize::MAX, true)];
        for step in steps {
            match step {
                Step::Add => tracees.push((table.add_tracee().unwrap(), 0)),
                Step::Remove(index) if !tracees.is_empty() => {
                    let (tracee, _) = tracees.remove(index % tracees.len());
                    table.remove_tracee(tracee);
                }
                Step::Set(by, of, value) if !tracees.is_empty() => {
                    let (capability, may, _, valid) = &held[by % held.len()];
                    let place = of % tracees.len();
                    let others: i64 =
                        tracees.iter().enumerate().filter(|(i, _)| *i != place).map(|(_, (_, v))| v).sum();
                    let (tracee, before) = tracees[place];
                    let fits = others + value <= 150 || value <= before;
                    let expected = *may && *valid && (0..=100).contains(&value) && fits;
                    let done = table.set(capability, tracee, &[("a", value)]);
                    prop_assert_eq!(done.is_ok(), expected, "{:?}", done);
                    if expected {
                        tracees[place].1 = value;
                    }
                }
                Step::Derive(from, bits) => {
                    let from = from % held.len();
                    let write = ClassSet::of((0..64).filter(|bit| bits >> bit & 1 == 1));
                    let derived = table.derive(&held[from].0, Rights { write, ..Rights::ALL });
                    prop_assert_eq!(derived.is_ok(), held[from].3);
                    if let Ok(derived) = derived {
                        held.push((derived, held[from].1 && write.has(a), from, true));
                    }
                }
                Step::Revoke(index) if index % held.len() > 0 => {
                    let index = index % held.len();
                    table.revoke(&held[index].0);
                    held[index].3 = false;
                    for later in index + 1..held.len() {
                        let parent = held[later].2;
                        held[later].3 &= held[parent].3;
                    }
                }
                _ => {}
            }
            for (tracee, value) in &tracees {
                prop_assert_eq!(table.value(*tracee, a), Ok(*value));
            }
        }
    }
}

/// Counts upcalls, up to a bound, until it is gone.
struct Counted {
    made: std::sync::Arc<std::sync::Mutex<Vec<(u32, i64)>>>,
    is_gone: bool,
}

impl super::Upcalls for Counted {
    fn upcall(&mut self, number: u32, value: i64) -> Result<(), super::NotMade> {
        let mut made = self.made.lock().unwrap();
        if self.is_gone {
            return Err(super::NotMade::Gone);
        }
        if made.len() >= 2 {
            return Err(super::NotMade::Full);
        }
        made.push((number, value));
        Ok(())
    }
}

#[test]
fn upcalls_require_the_right_to_the_tracee() {
    let mut table = Table::new(Classes::own().unwrap());
    let [one, other] = [(); 2].map(|()| table.add_tracee().unwrap());
    let all = table.grant(Rights::ALL).unwrap();
    let mut by = |rights: Rights| table.derive(&all, rights).unwrap();
    let own = by(Rights { scope: Scope::One(one), ..Rights::ALL });
    let reader = by(Rights { scope: Scope::None, ..Rights::ALL });
    let silent = by(Rights { emit: false, ..Rights::ALL });
    let registered = |table: &mut Table, tracee, is_gone| {
        let made = std::sync::Arc::default();
        table.set_upcalls(tracee, Box::new(Counted { made: std::sync::Arc::clone(&made), is_gone }));
        made
    };
    assert_eq!(table.upcall(&all, one, 1, 2), Err(AttributeError::NotRegistered(one.0)));
    let made = registered(&mut table, one, false);
    let others = registered(&mut table, other, false);
    for (capability, tracee) in [(&own, other), (&reader, one), (&silent, one)] {
        let result = table.upcall(capability, tracee, 1, 2);
        assert!(matches!(result, Err(AttributeError::Denied { operation: "make", .. })), "{result:?}");
    }
    assert_eq!((table.upcall(&own, one, 1, -2), table.upcall(&all, one, 3, 4)), (Ok(()), Ok(())));
    assert_eq!(table.upcall(&own, one, 5, 6), Err(AttributeError::Full("upcall")));
    assert_eq!((&*made.lock().unwrap(), others.lock().unwrap().len()), (&vec![(1, -2), (3, 4)], 0));
    // Where nothing is registered, or the tracee has ended.
    let _ = registered(&mut table, one, true);
    for _ in 0..2 {
        assert_eq!(table.upcall(&own, one, 1, 2), Err(AttributeError::NotRegistered(one.0)));
    }
    table.remove_tracee(other);
    let _ = registered(&mut table, other, false);
    assert_eq!(table.upcall(&all, other, 1, 2), Err(AttributeError::NotRegistered(other.0)));
    table.revoke(&all);
    assert_eq!(table.upcall(&own, one, 1, 2), Err(AttributeError::Revoked));
}
