//! What each account may have of the memory that all have together.
//!
//! A share is settled when the account comes, and depends on how many accounts there are, never on what they have registered: so no
//! account learns from a refusal what another one has. All shares together are never more than the whole.

use std::collections::HashMap;

use crate::trust_domain::TrustDomain;

/// An account that comes later gets one part in so many of what is left.
const PART: u64 = 4;

/// The shares of all accounts.
#[derive(Debug)]
pub(crate) struct Shares {
    whole: u64,
    most: u64,
    given: HashMap<TrustDomain, u64>,
    sum: u64,
}

impl Shares {
    /// Creates shares of `whole` bytes, each of at most `most`. Half of all is for the `expected` accounts, in equal parts.
    pub(crate) fn new(whole: u64, most: u64, expected: &[TrustDomain]) -> Self {
        let mut shares = Self { whole, most, given: HashMap::new(), sum: 0 };
        let each = (whole / 2 / (expected.len() as u64).max(1)).min(most);
        for account in expected {
            shares.restore(account, each);
        }
        shares
    }

    /// Returns the share of an account, which gets one if it has none.
    pub(crate) fn admit(&mut self, account: &TrustDomain) -> u64 {
        if let Some(share) = self.given.get(account) {
            return *share;
        }
        let share = (self.whole.saturating_sub(self.sum) / PART).min(self.most);
        self.restore(account, share);
        share
    }

    /// Gives an account the share that it had before.
    pub(crate) fn restore(&mut self, account: &TrustDomain, share: u64) {
        let before = self.given.insert(account.clone(), share).unwrap_or(0);
        self.sum = self.sum - before + share;
    }

    /// Takes the share of an account that has nothing and nobody any more.
    pub(crate) fn leave(&mut self, account: &TrustDomain) {
        self.sum -= self.given.remove(account).unwrap_or(0);
    }

    /// Returns the share of an account; 0 if it has none.
    pub(crate) fn of(&self, account: &TrustDomain) -> u64 {
        self.given.get(account).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_share_does_not_depend_on_what_others_do_with_theirs() {
        let expected = [TrustDomain::Public, TrustDomain::Named("a".into())];
        let mut shares = Shares::new(1000, 300, &expected);
        assert_eq!((shares.of(&expected[0]), shares.of(&expected[1])), (250, 250));
        let user = TrustDomain::User;
        assert_eq!((shares.admit(&user(1)), shares.admit(&user(2)), shares.admit(&user(1))), (125, 93, 125));
        shares.leave(&user(1));
        assert_eq!((shares.of(&user(1)), shares.admit(&user(3))), (0, 101));
        let mut rich = Shares::new(1 << 40, 300, &expected);
        assert_eq!((rich.of(&expected[0]), rich.admit(&user(1))), (300, 300));
    }

    proptest! {
        #[test]
        fn shares_are_never_more_than_the_whole(steps in proptest::collection::vec((0_u32..50, any::<bool>()), 0..200)) {
            let mut shares = Shares::new(1 << 40, 1 << 38, &[]);
            for (number, comes) in steps {
                let account = TrustDomain::User(number);
                if comes {
                    prop_assert!(shares.admit(&account) > 0);
                } else {
                    shares.leave(&account);
                }
                prop_assert!(shares.given.values().sum::<u64>() == shares.sum && shares.sum <= shares.whole);
            }
        }
    }
}
