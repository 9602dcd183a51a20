//! The table against a model that has lists only.

use proptest::prelude::*;

use super::*;
use crate::objects::shares::Shares;

#[derive(Clone, Debug)]
enum Step {
    Insert { domain: u8, id: u8, bytes: u64 },
    Find { holder: u8, id: u8 },
    Release { holder: u8, id: u8 },
    Leave { holder: u8 },
    Expire { keep: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let (holder, id) = (0_u8..4, 0_u8..6);
    prop_oneof![
        (0_u8..3, id.clone(), 1_u64..60).prop_map(|(domain, id, bytes)| Step::Insert { domain, id, bytes }),
        (holder.clone(), id.clone()).prop_map(|(holder, id)| Step::Find { holder, id }),
        (holder.clone(), id).prop_map(|(holder, id)| Step::Release { holder, id }),
        holder.prop_map(|holder| Step::Leave { holder }),
        (0_u64..10).prop_map(|keep| Step::Expire { keep }),
    ]
}

const LIMITS: Limits = Limits { bytes: 100, objects: 4 };

/// Holders 0 and 1 are of user 1, 2 and 3 of user 2; number 0 is what is public.
fn domain(number: u8) -> TrustDomain {
    if number == 0 { TrustDomain::Public } else { TrustDomain::User(number.into()) }
}

fn realm_of(holder: u8) -> TrustDomain {
    domain(1 + holder / 2)
}

fn name(id: u8) -> ObjectId {
    ObjectId([id; 32])
}

/// What there should be: (trust domain, id, bytes, idle since), and one (holder, trust domain, id) for each hold.
#[derive(Default)]
struct Model {
    objects: Vec<(TrustDomain, u8, u64, u64)>,
    holds: Vec<(u8, TrustDomain, u8)>,
}

impl Model {
    fn held(&self, domain: &TrustDomain, id: u8) -> bool {
        self.holds.iter().any(|(_, r, i)| r == domain && *i == id)
    }

    fn has(&self, domain: &TrustDomain, id: u8) -> bool {
        self.objects.iter().any(|(r, i, _, _)| r == domain && *i == id)
    }

    fn insert(&mut self, domain: &TrustDomain, id: u8, bytes: u64, now: u64) -> bool {
        if self.has(domain, id) {
            return true;
        }
        let kept = self.objects.clone();
        loop {
            let of_domain = self.objects.iter().filter(|(r, ..)| r == domain);
            let (count, sum) =
                of_domain.fold((0, 0), |(count, sum), (_, _, bytes, _)| (count + 1, sum + bytes));
            if sum + bytes <= LIMITS.bytes && count < LIMITS.objects {
                self.objects.push((domain.clone(), id, bytes, now));
                return true;
            }
            let idle = self.objects.iter().filter(|(r, i, ..)| r == domain && !self.held(r, *i));
            let Some(oldest) = idle.map(|(_, i, _, since)| (*since, *i)).min() else {
                self.objects = kept;
                return false;
            };
            self.objects.retain(|(r, i, ..)| r != domain || *i != oldest.1);
        }
    }

    fn touch(&mut self, domain: &TrustDomain, id: u8, now: u64) {
        if !self.held(domain, id) {
            for object in &mut self.objects {
                if object.0 == *domain && object.1 == id {
                    object.3 = now;
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_book_is_as_the_model_says(steps in proptest::collection::vec(step(), 1..60)) {
        let accounts = Accounts::new(Shares::new(1 << 40, 1 << 38, &[]));
        let mut table = Table::new(LIMITS, accounts, |_| false);
        for number in 0..4 {
            table.accounts_mut().admit(&domain(number), &domain(number));
        }
        let mut model = Model::default();
        // What the keeper would know from the changes alone.
        let mut told: HashMap<(Holder, TrustDomain, ObjectId), u64> = HashMap::new();
        for (now, step) in (10_u64..).zip(steps) {
            match step {
                Step::Insert { domain: number, id, bytes } => {
                    let domain = domain(number);
                    let fits = table.insert(&domain, name(id), (), bytes, false, now).is_ok();
                    prop_assert_eq!(fits, model.insert(&domain, id, bytes, now));
                }
                Step::Find { holder, id } => {
                    let own = realm_of(holder);
                    let found = table.hand_out(holder.into(), &own, name(id)).map(|(place, _)| place);
                    let wanted = [own, TrustDomain::Public].into_iter().find(|domain| model.has(domain, id));
                    prop_assert_eq!(&found, &wanted);
                    model.holds.extend(wanted.map(|domain| (holder, domain, id)));
                }
                Step::Release { holder, id } => {
                    let own = realm_of(holder);
                    let released = table.release(holder.into(), &own, name(id), now);
                    let place = [own, TrustDomain::Public]
                        .into_iter()
                        .find_map(|domain| model.holds.iter().position(|hold| *hold == (holder, domain.clone(), id)));
                    prop_assert_eq!(released, place.is_some());
                    if let Some(place) = place {
                        let (_, domain, id) = model.holds.remove(place);
                        model.touch(&domain, id, now);
                    }
                }
                Step::Leave { holder } => {
                    table.remove_holder(holder.into(), now);
                    let (gone, stay): (Vec<_>, Vec<_>) = model.holds.drain(..).partition(|(h, ..)| *h == holder);
                    model.holds = stay;
                    for (_, domain, id) in gone {
                        model.touch(&domain, id, now);
                    }
                }
                Step::Expire { keep } => {
                    let before = now - keep;
                    table.expire(before);
                    let held: Vec<bool> = model.objects.iter().map(|(r, i, ..)| model.held(r, *i)).collect();
                    let mut held = held.into_iter();
                    model.objects.retain(|(.., since)| held.next() == Some(true) || *since > before);
                }
            }
            for change in table.take_changes() {
                match change {
                    Change::Held(holder, domain, id, 0) => drop(told.remove(&(holder, domain, id))),
                    Change::Held(holder, domain, id, holds) => drop(told.insert((holder, domain, id), holds)),
                    Change::Evicted(domain, id) => {
                        prop_assert!(table.get(&domain, id).is_none());
                        prop_assert!(!told.keys().any(|(_, r, i)| *r == domain && *i == id), "evicted while held");
                    }
                }
            }
            let mut seen: Vec<_> = table
                .trust_domains()
                .flat_map(|(domain, objects)| {
                    objects.iter().map(|(id, entry)| (domain.clone(), id.0[0], entry.bytes, entry.holders > 0))
                })
                .collect();
            let mut wanted: Vec<_> =
                model.objects.iter().map(|(r, i, bytes, _)| (r.clone(), *i, *bytes, model.held(r, *i))).collect();
            seen.sort();
            wanted.sort();
            prop_assert_eq!(seen, wanted);
            let mut counted: HashMap<(Holder, TrustDomain, ObjectId), u64> = HashMap::new();
            for (holder, domain, id) in &model.holds {
                *counted.entry(((*holder).into(), domain.clone(), name(*id))).or_insert(0) += 1;
            }
            prop_assert_eq!(&told, &counted);
        }
    }
}
