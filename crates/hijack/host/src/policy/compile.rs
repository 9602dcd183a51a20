//! Checks what rules say against what is known of calls.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use orrery_compiled_handler::{Handler, LARGEST_TEXT};
use orrery_hijack_image::glob;
use orrery_hijack_image::handler::needs;
use orrery_hijack_image::policy::{CALLERS, NO_ARGUMENT, RULES, Rule, Shape, action, kinds, log};
use orrery_policy::{Fault, Rule as RuleText, Words};
use toml::Spanned;

use super::handler_compiler;
use super::values::{self, Destination};
use crate::calls::{self, Signature};

/// A rule that was checked: texts are not in the table yet.
#[derive(Debug, Clone, Default)]
pub(crate) struct Compiled {
    /// The rule, without its texts.
    pub(crate) rule: Rule,
    /// Numbers of the calls that it is about.
    pub(crate) calls: Vec<u32>,
    /// Patterns for paths, with separators.
    pub(crate) path: Vec<u8>,
    /// Whether it is about `fstat`, however that is made.
    pub(crate) descriptors: bool,
    /// Patterns for paths of unix sockets.
    pub(crate) address_path: Vec<u8>,
    pub(crate) target: Vec<u8>,
    /// Patterns for files of code.
    pub(crate) callers: Vec<u8>,
    /// The patterns for programs.
    pub(crate) programs: Vec<u8>,
    /// What decides, if a handler does.
    pub(crate) handler: Option<Arc<Handler>>,
}

/// Calls that are an `fstat` if their path is empty.
const BY_EMPTY_PATH: [&str; 2] = ["newfstatat", "statx"];
/// Without these, a program could not go on, or not end.
const NEVER_ANSWERED: [&str; 3] = ["rt_sigreturn", "exit", "exit_group"];
const KINDS: [(&str, u32); 7] = [
    ("file", kinds::FILE),
    ("directory", kinds::DIRECTORY),
    ("socket", kinds::SOCKET),
    ("pipe", kinds::PIPE),
    ("character", kinds::CHARACTER),
    ("block", kinds::BLOCK),
    ("other", kinds::OTHER),
];

fn wrong<T, R>(at: &Spanned<T>, message: impl Into<String>) -> Result<R, Fault> {
    Err(Fault { span: at.span(), message: message.into() })
}

/// Calls that submit requests to the kernel past every system call.
const IO_URING: [&str; 3] = ["io_uring_setup", "io_uring_enter", "io_uring_register"];

/// The rules that close what the given ones leave open: behind all of them, so that these may allow it. A policy that
/// denies something has calls that are newer than this table fail as on an older kernel; one that denies paths or
/// addresses, the rings whose requests name some.
pub(crate) fn closing(given: &[Compiled]) -> Vec<Compiled> {
    // All share the last counter, which nobody asks for.
    let counter = u32::try_from(RULES - 1).unwrap_or(0);
    let refusing = |calls: Vec<u32>, errno: i32| {
        let rule = Rule { action: action::ANSWER, value: -i64::from(errno), counter, ..Rule::default() };
        Compiled { rule, calls, ..Compiled::default() }
    };
    let denying: Vec<_> = given.iter().filter(|compiled| compiled.denies()).collect();
    let mut closing = Vec::new();
    if !denying.is_empty() {
        closing.push(refusing(calls::unknown(), libc::ENOSYS));
    }
    let about_files = |compiled: &&Compiled| {
        !compiled.path.is_empty() || compiled.rule.address.family != 0 || compiled.handler.is_some()
    };
    if denying.iter().any(about_files) {
        let numbers = IO_URING.iter().filter_map(|name| Some(calls::named(name)?.number)).collect();
        closing.push(refusing(numbers, libc::EPERM));
    }
    closing
}

impl Compiled {
    /// Returns whether it keeps something from a program: it has calls fail, and not only now and then, as one that
    /// injects faults does.
    pub(crate) fn denies(&self) -> bool {
        let Rule { action, value, site, every, after, times, .. } = self.rule;
        let refuses = action == action::HANDLER || action == action::ANSWER && value < 0;
        refuses && site == 0 && every <= 1 && after == 0 && times == 0
    }

    /// Returns whether it is nothing but a handler that needs nothing: executives then ask that, and look at nothing else.
    pub(crate) fn is_bare(&self) -> bool {
        if self.handler.as_deref().is_none_or(|handler| handler.needs != 0) {
            return false;
        }
        let alone = Rule {
            action: action::HANDLER,
            counter: self.rule.counter,
            value: self.rule.value,
            every: self.rule.every.min(1),
            ..Rule::default()
        };
        // An `fstat` by another name is no call of the rule's, unless it says so.
        let by_empty_path = |number: &u32| {
            BY_EMPTY_PATH.iter().any(|name| calls::named(name).is_some_and(|call| call.number == *number))
        };
        let texts = [&self.path, &self.address_path, &self.callers];
        self.rule == alone
            && texts.iter().all(|text| text.is_empty())
            && (self.descriptors || !self.calls.iter().any(by_empty_path))
    }
}

/// Compiles all rules.
pub(crate) fn compile(rules: &[Spanned<RuleText>]) -> Result<Vec<Compiled>, Fault> {
    let mut all = Vec::new();
    for (counter, rule) in (0..).zip(rules) {
        let compiled = compile_rule(rule, counter)?;
        if all.len() + compiled.len() > RULES {
            return wrong(rule, format!("a policy has {RULES} rules at most"));
        }
        all.extend(compiled);
    }
    if let Some(rule) = rules.iter().filter(|rule| rule.get_ref().caller.is_some()).nth(CALLERS) {
        return wrong(rule, format!("{CALLERS} rules at most name callers"));
    }
    Ok(all)
}

/// One rule: more than one where it has several addresses, or one that means IPv4 and IPv6.
fn compile_rule(spanned: &Spanned<RuleText>, counter: u32) -> Result<Vec<Compiled>, Fault> {
    let text = spanned.get_ref();
    let mut compiled = Compiled { rule: Rule { counter, ..Rule::default() }, ..Compiled::default() };
    let named = selected(&text.call, text.path.is_some())?;
    let mut signatures: Vec<&Signature> = named.iter().map(|(signature, _)| *signature).collect();
    // What was named must fit; of what belongs to a group, that is taken which does.
    let mut restrict = |condition: &str, fits: &dyn Fn(&Signature) -> bool| {
        if let Some((signature, _)) = named.iter().find(|(signature, explicit)| *explicit && !fits(signature))
        {
            return wrong(&text.call, format!("{} {condition}", signature.name));
        }
        signatures.retain(|signature| fits(signature));
        Ok(())
    };
    act(text, spanned, &mut compiled)?;
    if matches!(compiled.rule.action, action::ANSWER | action::HANDLER) {
        restrict("cannot be answered: the program could not go on, or not end", &|signature| {
            !NEVER_ANSWERED.contains(&signature.name)
        })?;
    }
    if let Some(path) = &text.path {
        compiled.path = patterns(path, |word| match word {
            word if word.starts_with(['/', '*']) => Ok(word.to_owned()),
            word if word.contains(":[") => Ok(word.to_owned()),
            word => Err(format!(
                "{word:?} is relative: paths are compared from the root, so write /... or **/{word}"
            )),
        })?;
        restrict("takes neither a path nor a descriptor", &|signature| {
            let shape = signature.shape();
            shape.path[0] != NO_ARGUMENT || shape.descriptor != NO_ARGUMENT
        })?;
    }
    if let Some(descriptor) = &text.descriptor {
        for word in words(descriptor) {
            let Some((_, kind)) = KINDS.iter().find(|(name, _)| *name == word) else {
                let names = KINDS.map(|(name, _)| name).join(", ");
                return wrong(descriptor, format!("{word:?} is no kind of descriptor: {names}"));
            };
            compiled.rule.kinds |= kind;
        }
        restrict("takes no descriptor", &|signature| signature.shape().descriptor != NO_ARGUMENT)?;
    }
    match compiled.rule.action {
        action::REWRITE => {
            restrict("takes no path", &|signature| signature.shape().path[0] != NO_ARGUMENT)?;
        }
        action::SHORT => restrict("transfers no bytes, or its number of bytes is not known", &|signature| {
            let Shape { count, vector, .. } = signature.shape();
            count != NO_ARGUMENT || vector != NO_ARGUMENT
        })?,
        action::REDIRECT => restrict("does not connect", &|signature| signature.name == "connect")?,
        _ => {}
    }
    if text.address.is_some() {
        restrict("takes no address", &|signature| signature.shape().address != NO_ARGUMENT)?;
    }
    if signatures.is_empty() {
        return wrong(&text.call, "none of these calls fits what the rule says of them");
    }
    compiled.calls = signatures.iter().map(|signature| signature.number).collect();
    // C libraries make `fstat` as a `newfstatat` with an empty path: that takes no path, though the call is in the
    // group.
    compiled.descriptors = signatures.iter().any(|signature| signature.name == "fstat")
        || named.iter().any(|(signature, explicit)| *explicit && BY_EMPTY_PATH.contains(&signature.name));
    for (files, place) in [(&text.caller, &mut compiled.callers), (&text.program, &mut compiled.programs)] {
        if let Some(files) = files {
            *place = patterns(files, |word| Ok(values::file_pattern(word)))?;
        }
    }
    let destinations = match &text.address {
        None => vec![Destination { address: compiled.rule.address, path: Vec::new() }],
        Some(address) => {
            let mut all = Vec::new();
            for (at, word) in &address.get_ref().0 {
                let found = values::destinations(word);
                let span = at.clone().unwrap_or_else(|| address.span());
                all.extend(found.map_err(|message| Fault { span, message })?);
            }
            if all.is_empty() {
                return wrong(address, "an empty list of addresses fits no call");
            }
            all
        }
    };
    let with = |destination: Destination| {
        let mut compiled = compiled.clone();
        compiled.rule.address = destination.address;
        compiled.address_path = destination.path;
        compiled
    };
    Ok(destinations.into_iter().map(with).collect())
}

/// The calls that a rule names, and whether it names them one by one. `%file` in a rule about paths means calls that
/// reach Unix sockets by their paths, too.
fn selected(call: &Spanned<Words>, about_paths: bool) -> Result<Vec<(&'static Signature, bool)>, Fault> {
    let mut found = Vec::new();
    for (at, word) in &call.get_ref().0 {
        let Some(signatures) = calls::group(word) else {
            let at = at.clone().unwrap_or_else(|| call.span());
            return Err(Fault { span: at, message: calls::no_such_call(word) });
        };
        let explicit = calls::named(word).is_some();
        found.extend(signatures.into_iter().map(|signature| (signature, explicit)));
        if about_paths && word == "%file" {
            found.extend(calls::all().iter().filter(|call| call.takes_address()).map(|call| (call, false)));
        }
    }
    if found.is_empty() {
        return wrong(call, "the list of calls is empty");
    }
    Ok(found)
}

fn words(words: &Spanned<Words>) -> impl Iterator<Item = &str> {
    words.get_ref().0.iter().map(|(_, word)| word.as_str())
}

fn patterns(list: &Spanned<Words>, each: impl Fn(&str) -> Result<String, String>) -> Result<Vec<u8>, Fault> {
    let mut patterns = Vec::new();
    for (at, word) in &list.get_ref().0 {
        let error = |message| Fault { span: at.clone().unwrap_or_else(|| list.span()), message };
        if word.is_empty() || word.contains('\0') {
            return Err(error("a pattern has at least one byte, and no zero byte".to_owned()));
        }
        if !patterns.is_empty() {
            patterns.push(glob::SEPARATOR);
        }
        patterns.extend(each(word).map_err(error)?.into_bytes());
    }
    if patterns.is_empty() {
        return wrong(list, "the list is empty: leave it out if anything fits");
    }
    Ok(patterns)
}

/// Compiles what the rule does.
fn act(text: &RuleText, whole: &Spanned<RuleText>, compiled: &mut Compiled) -> Result<(), Fault> {
    let rule = &mut compiled.rule;
    let mut decided: Option<&str> = None;
    let mut decide = |name: &'static str, at: std::ops::Range<usize>| match decided.replace(name) {
        None => Ok(()),
        Some(other) => Err(Fault {
            span: at,
            message: format!("a rule does one thing: {other} or {name}, in two rules"),
        }),
    };
    if let Some(allow) = &text.allow {
        decide("allow", allow.span())?;
        if !allow.get_ref() {
            return wrong(allow, "allow is true, or left out; to deny, write deny = \"EPERM\"");
        }
        rule.action = action::ALLOW;
    }
    if let Some(deny) = &text.deny {
        decide("deny", deny.span())?;
        let errno = values::errno(deny.get_ref()).or_else(|message| wrong(deny, message))?;
        (rule.action, rule.value) = (action::ANSWER, -i64::from(errno));
    }
    if let Some(answer) = &text.answer {
        decide("return", answer.span())?;
        (rule.action, rule.value) = (action::ANSWER, *answer.get_ref());
    }
    if let Some(short) = &text.short {
        decide("short", short.span())?;
        (rule.action, rule.value) = (action::SHORT, i64::from(count(short)?));
    }
    if let Some(rewrite) = &text.rewrite {
        decide("rewrite", rewrite.span())?;
        rule.action = action::REWRITE;
        let target = rewrite.get_ref();
        if !target.starts_with('/') || target.contains('\0') {
            return wrong(rewrite, "the new beginning of a path is itself a path from the root");
        }
        let [pattern] = text.path.iter().flat_map(words).collect::<Vec<_>>()[..] else {
            return wrong(
                rewrite,
                "rewrite needs one path pattern, whose part before the first star it replaces",
            );
        };
        let literal = glob::literal(pattern.as_bytes());
        rule.prefix = u32::try_from(literal).unwrap_or(u32::MAX);
        compiled.target = target.trim_end_matches('/').as_bytes().to_vec();
    }
    if let Some(redirect) = &text.redirect {
        decide("redirect", redirect.span())?;
        rule.action = action::REDIRECT;
        let Some(address) = &text.address else {
            return wrong(redirect, "redirect needs an address whose connections it redirects");
        };
        let (family, target) =
            values::target(redirect.get_ref()).or_else(|message| wrong(redirect, message))?;
        let unix = i32::from(family) == libc::AF_UNIX;
        if words(address).any(|address| unix != address.starts_with("unix:")) {
            return wrong(redirect, "a socket has one family: unix addresses lead to unix addresses only");
        }
        compiled.target = target;
    }
    if let Some(handler) = &text.handler {
        decide("handler", handler.span())?;
        rule.action = action::HANDLER;
        let path = handler.get_ref();
        let found = read_module(path).map_err(|error| error.to_string());
        let made = found.and_then(|source| handler_compiler::compile(&source));
        let made = made.or_else(|problem| {
            wrong(handler, format!("cannot use the handler {}: {problem}", path.display()))
        })?;
        rule.room = u32::from(made.needs & needs::REPLACES != 0);
        compiled.handler = Some(Arc::new(made));
    }
    if let Some(delay) = &text.delay {
        let duration = orrery_policy::values::duration(delay.get_ref());
        let duration = duration.or_else(|message| wrong(delay, message))?;
        let nanoseconds = u64::try_from(duration.as_nanos()).ok();
        let Some(nanoseconds) = nanoseconds.filter(|delay| *delay > 0) else {
            return wrong(delay, format!("{:?} is no duration to wait for", delay.get_ref()));
        };
        rule.delay = nanoseconds;
    }
    rule.log = u32::from(text.log.as_ref().is_some_and(|log| *log.get_ref())) * log::CALLS;
    if decided.is_none() && rule.delay == 0 && rule.log == 0 {
        return wrong(
            whole,
            "the rule does nothing: allow, deny, return, rewrite, redirect, short, handler, delay or log",
        );
    }
    for (given, place, least) in [
        (&text.every, &mut rule.every, 1),
        (&text.after, &mut rule.after, 0),
        (&text.times, &mut rule.times, 1),
    ] {
        if let Some(given) = given {
            *place = count(given)?;
            if *place < least {
                return wrong(given, "this counts calls: from 1 on");
            }
        }
    }
    Ok(())
}

/// Reads the file of a handler's module: as much as shows that it is too large, and nothing that is no file.
fn read_module(path: &Path) -> io::Result<Vec<u8>> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let most = LARGEST_TEXT as u64 + 1;
    let mut source = Vec::new();
    File::open(path)?.take(most).read_to_end(&mut source)?;
    Ok(source)
}

fn count(given: &Spanned<i64>) -> Result<u32, Fault> {
    u32::try_from(*given.get_ref())
        .or_else(|_| wrong(given, format!("this is a number from 0 to {}", u32::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiled(call: &str, change: impl FnOnce(&mut Compiled, &mut Handler)) -> Compiled {
        let mut handler = Handler {
            code: vec![0xc3],
            entry: 0,
            data: Vec::new(),
            constants: Vec::new(),
            globals: [0; _],
            stack: 0,
            needs: 0,
        };
        let rule = Rule { action: action::HANDLER, counter: 7, value: 3, ..Rule::default() };
        let calls = calls::named(call).map(|call| call.number).into_iter().collect();
        let mut compiled = Compiled { rule, calls, ..Compiled::default() };
        change(&mut compiled, &mut handler);
        compiled.handler = Some(Arc::new(handler));
        compiled
    }

    #[test]
    fn a_rule_is_bare_that_is_a_handler_and_nothing_else() {
        assert!(compiled("getppid", |_, _| {}).is_bare());
        assert!(compiled("getppid", |compiled, _| compiled.rule.every = 1).is_bare());
        type Change = fn(&mut Compiled, &mut Handler);
        let further: [(&str, Change); 16] = [
            ("needs", |_, handler| handler.needs = needs::CHANGES),
            ("every", |compiled, _| compiled.rule.every = 2),
            ("after", |compiled, _| compiled.rule.after = 1),
            ("times", |compiled, _| compiled.rule.times = 1),
            ("kinds", |compiled, _| compiled.rule.kinds = kinds::FILE),
            ("log", |compiled, _| compiled.rule.log = log::CALLS),
            ("delay", |compiled, _| compiled.rule.delay = 1),
            ("site", |compiled, _| compiled.rule.site = 1),
            ("room", |compiled, _| compiled.rule.room = 1),
            ("prefix", |compiled, _| compiled.rule.prefix = 1),
            ("action", |compiled, _| compiled.rule.action = action::ANSWER),
            ("address", |compiled, _| compiled.rule.address.family = 2),
            ("path", |compiled, _| compiled.path = b"/x".to_vec()),
            ("address path", |compiled, _| compiled.address_path = b"/x".to_vec()),
            ("callers", |compiled, _| compiled.callers = b"/x".to_vec()),
            ("callers' marks", |compiled, _| compiled.rule.callers = 1),
        ];
        for (what, change) in further {
            assert!(!compiled("getppid", change).is_bare(), "{what}");
        }
        let none = Compiled { handler: None, ..compiled("getppid", |_, _| {}) };
        assert!(!none.is_bare());
    }

    /// An `fstat` may be made by another name, with an empty path: rules about files are not asked then, unless they say so.
    #[test]
    fn a_rule_about_paths_is_no_bare_one_where_they_may_be_empty() {
        for call in BY_EMPTY_PATH {
            assert!(!compiled(call, |_, _| {}).is_bare(), "{call}");
            assert!(compiled(call, |compiled, _| compiled.descriptors = true).is_bare(), "{call}");
        }
    }
}
