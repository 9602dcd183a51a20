//! Which account each trust domain belongs to, and what an account has of its share.
//!
//! An account is a user, with all user IDs that the user has in user namespaces; or a trust domain with a name. A user can have
//! thousands of such IDs, each of which is a trust domain of its own.

use std::collections::HashMap;

use crate::objects::shares::Shares;
use crate::trust_domain::TrustDomain;

/// The accounts of all trust domains. An account is called like its first trust domain.
#[derive(Debug)]
pub(crate) struct Accounts {
    shares: Shares,
    of_domain: HashMap<TrustDomain, TrustDomain>,
    charged: HashMap<TrustDomain, u64>,
}

impl Accounts {
    /// Creates the accounts that have these shares.
    pub(crate) fn new(shares: Shares) -> Self {
        Self { shares, of_domain: HashMap::new(), charged: HashMap::new() }
    }

    /// Returns the account of a trust domain; one that is not known is an account of its own.
    pub(crate) fn of<'a>(&'a self, domain: &'a TrustDomain) -> &'a TrustDomain {
        self.of_domain.get(domain).unwrap_or(domain)
    }

    /// Enters a trust domain that is not known yet into `account`; returns the share of the account if it was not known.
    pub(crate) fn admit(&mut self, domain: &TrustDomain, account: &TrustDomain) -> Option<u64> {
        if self.of_domain.contains_key(domain) {
            return None;
        }
        self.of_domain.insert(domain.clone(), account.clone());
        Some(self.shares.admit(account))
    }

    /// Enters a trust domain as it was before.
    pub(crate) fn restore(&mut self, domain: &TrustDomain, account: &TrustDomain, share: u64) {
        self.of_domain.insert(domain.clone(), account.clone());
        self.shares.restore(account, share);
    }

    /// Removes a trust domain that has no objects and no clients any more, and its account if that has no other.
    pub(crate) fn forget(&mut self, domain: &TrustDomain) {
        let Some(account) = self.of_domain.remove(domain) else { return };
        if !self.of_domain.values().any(|other| *other == account) {
            self.shares.leave(&account);
        }
    }

    /// Returns all trust domains that are known, with their accounts and the shares of these.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&TrustDomain, &TrustDomain, u64)> {
        self.of_domain.iter().map(|(domain, account)| (domain, account, self.shares.of(account)))
    }

    /// Returns the share of a trust domain's account.
    pub(crate) fn share(&self, domain: &TrustDomain) -> u64 {
        self.shares.of(self.of(domain))
    }

    /// Returns how much of its share the account of a trust domain has left.
    pub(crate) fn left(&self, domain: &TrustDomain) -> u64 {
        let account = self.of(domain);
        self.shares.of(account).saturating_sub(self.charged.get(account).copied().unwrap_or(0))
    }

    /// Charges the account of a trust domain for an object.
    pub(crate) fn charge(&mut self, domain: &TrustDomain, bytes: u64) {
        let account = self.of(domain).clone();
        *self.charged.entry(account).or_insert(0) += bytes;
    }

    /// Takes back what the account of a trust domain was charged for an object.
    pub(crate) fn refund(&mut self, domain: &TrustDomain, bytes: u64) {
        let account = self.of(domain).clone();
        if let Some(charged) = self.charged.get_mut(&account) {
            *charged = charged.saturating_sub(bytes);
            if *charged == 0 {
                self.charged.remove(&account);
            }
        }
    }
}
