//! File descriptors are shared out among accounts.

use std::collections::HashMap;

use crate::trust_domain::TrustDomain;

/// Counts the descriptors of each account: its backing files and its connections.
#[derive(Debug)]
pub(crate) struct DescriptorBudget {
    used: HashMap<TrustDomain, usize>,
    limit: usize,
}

impl DescriptorBudget {
    /// Creates a budget without a limit, for descriptors that the store had before.
    pub(super) fn unlimited() -> Self {
        Self { used: HashMap::new(), limit: usize::MAX }
    }

    /// Sets how many descriptors all accounts may have together.
    pub(super) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Counts one more descriptor of `account`.
    pub(super) fn add(&mut self, account: &TrustDomain) {
        *self.used.entry(account.clone()).or_insert(0) += 1;
    }

    /// Counts one descriptor less of `account`.
    pub(super) fn remove(&mut self, account: &TrustDomain) {
        if let Some(count) = self.used.get_mut(account) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                self.used.remove(account);
            }
        }
    }

    /// Returns how many descriptors `account` has to close before it may have another.
    ///
    /// It may have another as long as it has fewer than are left: one account alone gets half of all, the next one half of
    /// the rest, and each that comes later still finds some.
    pub(super) fn to_free(&self, account: &TrustDomain) -> usize {
        let used: usize = self.used.values().sum();
        let own = self.used.get(account).copied().unwrap_or(0);
        let left = self.limit.saturating_sub(used);
        // Each that is closed is one less of its own, and one more that is left.
        if own < left { 0 } else { (own - left) / 2 + 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_account_gets_half_of_what_is_left() {
        let mut budget = DescriptorBudget::unlimited();
        budget.set_limit(16);
        let (one, other) = (TrustDomain::User(1), TrustDomain::User(2));
        while budget.to_free(&one) == 0 {
            budget.add(&one);
        }
        while budget.to_free(&other) == 0 {
            budget.add(&other);
        }
        assert_eq!((budget.used[&one], budget.used[&other]), (8, 4));
        budget.remove(&other);
        assert_eq!((budget.to_free(&other), budget.to_free(&one)), (0, 2));
    }
}
