//! A policy's rules, for those who hold them by other means than an executive.

use std::net::{IpAddr, SocketAddr};

use orrery_hijack_image::glob;
use orrery_hijack_image::policy::action;

use super::Policy;
use super::compile::Compiled;

/// One rule of a policy.
#[derive(Debug, Clone, Copy)]
pub struct RuleView<'p> {
    compiled: &'p Compiled,
    line: usize,
}

/// What a rule does with a call, beside waiting and telling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The call has no effect on files or sockets.
    None,
    /// It is performed, and further rules are not asked.
    Allow,
    /// It returns this, as the kernel has it: errors are negative.
    Answer(i64),
    /// Its path is rewritten.
    Rewrite,
    /// It goes to another address.
    Redirect,
    /// It transfers fewer bytes.
    Short,
    /// A handler decides.
    Handler,
}

/// Where a call goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination<'a> {
    /// An internet address.
    Internet(SocketAddr),
    /// A Unix socket: its path, or a zero byte and its abstract name.
    Unix(&'a [u8]),
}

impl Policy {
    /// Returns the rules, in their order. One whose address means IPv4 and IPv6 is two.
    pub fn rules(&self) -> impl Iterator<Item = RuleView<'_>> {
        self.rules.iter().map(|compiled| RuleView {
            compiled,
            line: usize::try_from(compiled.rule.counter)
                .ok()
                .and_then(|rule| self.lines.get(rule).copied())
                .unwrap_or(0),
        })
    }

    /// The same policy, in which each rule is about those of its calls for which `keep` says so.
    #[must_use]
    pub fn retain(mut self, keep: impl Fn(RuleView<'_>, u32) -> bool) -> Self {
        let kept: Vec<Vec<u32>> = self
            .rules()
            .map(|rule| rule.calls().iter().copied().filter(|call| keep(rule, *call)).collect())
            .collect();
        for (compiled, calls) in self.rules.iter_mut().zip(kept) {
            compiled.calls = calls;
        }
        self.rules.retain(|compiled| !compiled.calls.is_empty());
        self
    }
}

impl RuleView<'_> {
    /// The line in which it begins.
    pub fn line(&self) -> usize {
        self.line
    }

    /// The numbers of the calls that it is about.
    pub fn calls(&self) -> &[u32] {
        &self.compiled.calls
    }

    /// Returns the effect of the call.
    pub fn effect(&self) -> Effect {
        match self.compiled.rule.action {
            action::ALLOW => Effect::Allow,
            action::ANSWER => Effect::Answer(self.compiled.rule.value),
            action::REWRITE => Effect::Rewrite,
            action::REDIRECT => Effect::Redirect,
            action::SHORT => Effect::Short,
            action::HANDLER => Effect::Handler,
            _ => Effect::None,
        }
    }

    /// Returns which of its conditions depend on what a program can make up, or on what came before.
    pub fn forgeable(&self) -> Vec<&'static str> {
        let rule = &self.compiled.rule;
        let counted = rule.every > 1 || rule.after > 0 || rule.times > 0;
        [
            ("caller", !self.compiled.callers.is_empty() || rule.site != 0),
            ("program", !self.compiled.programs.is_empty()),
            ("descriptor", rule.kinds != 0),
            ("every, after or times", counted),
        ]
        .into_iter()
        .filter_map(|(name, there)| there.then_some(name))
        .collect()
    }

    /// Returns its patterns for paths; none: any path, or none at all.
    pub fn paths(&self) -> impl Iterator<Item = &[u8]> {
        let all = &self.compiled.path;
        all.split(|byte| *byte == glob::SEPARATOR).filter(|_| !all.is_empty())
    }

    /// Returns whether it is about a path.
    pub fn is_about_path(&self, path: &[u8]) -> bool {
        glob::any_matches(&self.compiled.path, path)
    }

    /// Returns whether renaming a directory would take paths out of what the rule is about: some beneath it match
    /// because of where they are.
    pub fn is_about_names_beneath(&self, directory: &[u8]) -> bool {
        self.paths().any(|pattern| may_match_beneath(pattern, directory))
    }

    /// The files or directories that its patterns stand for, where these are no more than that: `/file` or `/dir/**`.
    pub fn literal_paths(&self) -> Option<Vec<&[u8]>> {
        self.paths()
            .map(|pattern| {
                let literal = pattern.strip_suffix(b"/**").unwrap_or(pattern);
                (!literal.iter().any(|byte| matches!(byte, b'*' | b'?'))).then_some(literal)
            })
            .collect()
    }

    /// Returns whether its patterns for paths fit all of them.
    pub fn is_about_every_path(&self) -> bool {
        self.compiled.path.is_empty() || self.paths().any(|pattern| matches!(pattern, b"**" | b"/**"))
    }

    /// A path that it is about, rewritten.
    pub fn rewritten(&self, path: &[u8]) -> Vec<u8> {
        let from = usize::try_from(self.compiled.rule.prefix).unwrap_or(0).min(path.len());
        let new = [self.compiled.target.as_slice(), path.get(from..).unwrap_or_default()].concat();
        if new.is_empty() { b"/".to_vec() } else { new }
    }

    /// Returns whether it is about certain addresses only.
    pub fn has_address(&self) -> bool {
        self.compiled.rule.address.family != 0
    }

    /// Returns whether it is about this address. One of IPv4 may come as one of IPv6.
    pub fn is_about_address(&self, destination: Destination<'_>) -> bool {
        let wanted = &self.compiled.rule.address;
        match destination {
            Destination::Unix(path) => {
                i32::from(wanted.family) == libc::AF_UNIX && {
                    let patterns = &self.compiled.address_path;
                    patterns.is_empty() || glob::any_matches(patterns, path)
                }
            }
            Destination::Internet(address) => {
                let (family, bytes) = match address.ip().to_canonical() {
                    IpAddr::V4(ip) => (libc::AF_INET, ip.octets().to_vec()),
                    IpAddr::V6(ip) => (libc::AF_INET6, ip.octets().to_vec()),
                };
                i32::from(wanted.family) == family
                    && (wanted.port == 0 || wanted.port == address.port())
                    && same_bits(&wanted.bytes, &bytes, wanted.bits)
            }
        }
    }

    /// The `struct sockaddr` that calls are redirected to.
    pub fn target_address(&self) -> &[u8] {
        &self.compiled.target
    }
}

/// Returns whether a pattern can match a path beneath `directory` that it would not match anywhere else.
fn may_match_beneath(pattern: &[u8], directory: &[u8]) -> bool {
    if pattern.starts_with(b"**") {
        return false;
    }
    let names = |path: &[u8]| -> Vec<Vec<u8>> {
        path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()).map(<[u8]>::to_vec).collect()
    };
    let (pattern, directory) = (names(pattern), names(directory));
    for (index, name) in directory.iter().enumerate() {
        match pattern.get(index) {
            None => return false,
            Some(wanted) if wanted.windows(2).any(|two| two == b"**") => return true,
            Some(wanted) if !glob::matches(wanted, name) => return false,
            Some(_) => (),
        }
    }
    pattern.len() > directory.len()
}

/// Returns whether the first `bits` of both are the same.
fn same_bits(one: &[u8], other: &[u8], bits: u32) -> bool {
    let bits = usize::try_from(bits).unwrap_or(usize::MAX);
    one.iter().zip(other).enumerate().all(|(index, (one, other))| {
        let significant = bits.saturating_sub(8 * index).min(8);
        u16::from(one ^ other) >> (8 - significant) == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> Policy {
        Policy::parse(text, "p").unwrap()
    }

    #[test]
    fn rules_show_what_they_are_about() {
        let policy = policy(
            "[[rule]]\ncall = '%file'\npath = ['/etc/**', '/root']\ndeny = 'ENOENT'\n\n[[rule]]\ncall = 'openat'\n\
             path = '/a/*'\nrewrite = '/b'\nprogram = 'x'\n",
        );
        let rules: Vec<_> = policy.rules().collect();
        assert_eq!((rules[0].line(), rules[1].line()), (1, 6));
        assert_eq!((rules[0].effect(), rules[1].effect()), (Effect::Answer(-2), Effect::Rewrite));
        assert!(rules[0].is_about_path(b"/etc/x") && !rules[0].is_about_path(b"/usr"));
        assert_eq!(rules[0].paths().collect::<Vec<_>>(), [b"/etc/**".as_slice(), b"/root"]);
        assert_eq!(rules[1].rewritten(b"/a/file"), b"/b/file");
        assert_eq!((rules[0].forgeable(), rules[1].forgeable()), (vec![], vec!["program"]));
        let without = policy.clone().retain(|rule, _| rule.effect() != Effect::Rewrite);
        assert_eq!(without.rules().map(|rule| rule.line()).collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn what_renaming_would_take_away_is_found() {
        for (pattern, directory, kept) in [
            ("/a/secret/**", "/a", true),
            ("/a/secret/**", "/a/secret", true),
            ("/a/secret/**", "/a/secret/deep", true),
            ("/a/secret", "/a/secret", false),
            ("/a/secret/**", "/a/other", false),
            ("/home/*/x", "/home/u", true),
            ("/home/*/x", "/home/u/y", false),
            ("**/id", "/home", false),
        ] {
            assert_eq!(
                may_match_beneath(pattern.as_bytes(), directory.as_bytes()),
                kept,
                "{pattern} {directory}"
            );
        }
    }

    #[test]
    fn addresses_are_compared_as_executives_do() {
        let about = |address: &str, given: &str| {
            let policy =
                policy(&format!("[[rule]]\ncall = 'connect'\naddress = '{address}'\ndeny = 'EACCES'"));
            policy.rules().any(|rule| {
                rule.is_about_address(match given.strip_prefix("unix:") {
                    Some(path) => Destination::Unix(path.as_bytes()),
                    None => Destination::Internet(given.parse().unwrap()),
                })
            })
        };
        assert!(about("10.0.0.0/9:80", "10.127.0.1:80") && !about("10.0.0.0/9:80", "10.128.0.1:80"));
        assert!(!about("10.0.0.0/9:80", "10.0.0.1:81") && about("10.0.0.1", "[::ffff:10.0.0.1]:9"));
        assert!(about("*:80", "[2001:db8::1]:80") && about("::1", "[::1]:1") && !about("::1", "127.0.0.1:1"));
        assert!(about("unix:/run/**", "unix:/run/x/y") && !about("unix:/run/**", "unix:/tmp/x"));
    }
}
