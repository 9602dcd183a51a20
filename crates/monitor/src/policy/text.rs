//! Policies as people write them: TOML.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use orrery_policy::{Document, Entries, Fault, Files, Section, SystemCalls, values};
use orrery_sys::capability::CapabilitySet;
use rustix::io::Errno;
use toml::Spanned;

use super::network::Allowed;
use super::syscalls::{ESSENTIAL, Word, error_named, named};
use super::view::{Change, View};
use super::{Calls, Limits, Network, Opens, Policy, Refusal, Rights, Trees, capabilities, network};
use crate::{Error, SeccompProfile};

/// Reads `text`, which errors call `name`.
pub(super) fn parse(text: &str, name: &str) -> Result<Policy, Error> {
    let document = Document::parse(text, name)?;
    document.refuse(
        &Section::RULES,
        "this command allows by lists and knows no rules; orrery run --policy does, and --enforce holds them",
    )?;
    Ok(build(&document).map_err(|fault| document.error(fault))?)
}

fn build(document: &Document) -> Result<Policy, Fault> {
    let refusal = match document.refusal() {
        None => Refusal::Fails(Errno::ACCESS),
        Some(word) if word.get_ref() == "kill" => Refusal::Kills,
        Some(name) => Refusal::Fails(of(name, error_named)?),
    };
    let opens = match document.mediation() {
        None => Opens::Auto,
        Some(word) => of(word, |word| match word {
            "auto" => Ok(Opens::Auto),
            "always" => Ok(Opens::Monitor),
            "kernel" => Ok(Opens::Kernel),
            other => Err(format!("{other:?} is no kind of mediation: \"auto\", \"always\" or \"kernel\"")),
        })?,
    };
    let (network, limits) = (document.network(), document.limits());
    Ok(Policy {
        trees: trees(&document.files())?,
        network: Network { connect: addresses(&network.connect)?, bind: addresses(&network.bind)? },
        calls: calls(&document.calls())?,
        limits: Limits {
            processes: limits.processes,
            memory: size(limits.memory.as_ref())?,
            open_files: limits.open_files,
            file_size: size(limits.file_size.as_ref())?,
            cpu_seconds: limits.cpu_seconds,
        },
        view: document.view().map(view).transpose()?,
        capabilities: kept(document.capabilities())?,
        refusal,
        learning: false,
        audited: false,
        opens,
        rules: None,
        profiles: profiles(document.calls().seccomp.as_ref())?,
    })
}

/// What `read` makes of an entry.
pub(crate) fn of<T>(
    entry: &Spanned<String>,
    read: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, Fault> {
    read(entry.get_ref()).map_err(|message| Fault { span: entry.span(), message })
}

fn trees(files: &Files) -> Result<Trees, Fault> {
    let mut trees = Trees::default();
    let kinds = [
        (&files.stat, Rights::STAT),
        (&files.list, Rights::LIST),
        (&files.read, Rights::READ | Rights::LIST),
        (&files.write, Rights::WRITE),
        (&files.create, Rights::CREATE),
        (&files.execute, Rights::EXECUTE),
    ];
    for (entries, rights) in kinds {
        for entry in entries {
            let path = of(entry, absolute)?;
            trees.allow(real(&path).as_os_str().as_bytes(), rights);
            // The links on the way, which are looked at under their own names.
            trees.lead_to(path.as_os_str().as_bytes());
        }
    }
    for entry in &files.own {
        let path = of(entry, absolute)?;
        trees.allow_own(real(&path).as_os_str().as_bytes());
        trees.lead_to(path.as_os_str().as_bytes());
    }
    for entry in &files.deny {
        let path = of(entry, absolute)?;
        trees.deny(real(&path).as_os_str().as_bytes());
        trees.deny(path.as_os_str().as_bytes());
    }
    for entry in &files.read_only {
        let path = of(entry, absolute)?;
        for path in [real(&path), path] {
            trees.deny_changes(path.as_os_str().as_bytes());
        }
    }
    for entry in &files.except {
        let path = of(entry, absolute)?;
        trees.except(real(&path).as_os_str().as_bytes());
        trees.lead_to(path.as_os_str().as_bytes());
    }
    Ok(trees)
}

/// The path that an entry means: `~` is the home directory, `$NAME` or `${NAME}` an environment variable, and a relative
/// path starts where the guard was started.
fn absolute(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() {
        return Err(
            "an empty path means nothing; \"/\" is everything, \".\" the current directory".to_owned()
        );
    }
    if text.contains('\0') {
        return Err("no path contains a zero byte".to_owned());
    }
    let variable = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .ok_or_else(|| format!("{text:?}: the environment variable {name} is not set"))
    };
    let mut expanded = OsString::new();
    let mut rest = text;
    if let Some(behind) = rest.strip_prefix('~') {
        if !behind.is_empty() && !behind.starts_with('/') {
            return Err(format!("{text:?}: only one's own home directory is known as ~"));
        }
        expanded.push(variable("HOME")?);
        rest = behind;
    }
    while let Some((before, behind)) = rest.split_once('$') {
        expanded.push(before);
        let (name, after) = match behind.strip_prefix('{') {
            Some(braced) => braced
                .split_once('}')
                .ok_or_else(|| format!("{text:?}: the brace after $ is never closed"))?,
            None => {
                let end = behind.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                behind.split_at(end.unwrap_or(behind.len()))
            }
        };
        if name.is_empty() {
            return Err(format!("{text:?}: no variable's name follows the $"));
        }
        expanded.push(variable(name)?);
        rest = after;
    }
    expanded.push(rest);
    if expanded.as_bytes().contains(&b'*') {
        return Err(format!(
            "{text:?}: there are no wildcards; name the directory, which means all that lies in it"
        ));
    }
    std::path::absolute(&expanded).map(|path| lexical(&path)).map_err(|error| format!("{text:?}: {error}"))
}

/// Without `.` and with `..` taken by the letter only where nothing exists to ask.
fn lexical(path: &Path) -> PathBuf {
    let mut plain = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => plain.push(name),
            Component::ParentDir => {
                if let Ok(real) = plain.canonicalize() {
                    plain = real;
                }
                plain.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => (),
        }
    }
    plain
}

/// The path under which programs are asked about what an entry of `[files]` means.
pub(crate) fn entry_path(text: &str) -> Result<Vec<u8>, String> {
    Ok(real(&absolute(text)?).into_os_string().into_vec())
}

/// The path with all links followed, as far as it exists.
pub(crate) fn real(path: &Path) -> PathBuf {
    let mut missing: Vec<&OsStr> = Vec::new();
    let mut existing = path;
    loop {
        // What is `self` for the guard is not what it is for the program; the monitor asks for it by that name.
        if existing.starts_with("/proc/self") || existing.starts_with("/dev/fd") {
            return path.to_owned();
        }
        if let Ok(real) = existing.canonicalize() {
            let mut real = real;
            real.extend(missing.iter().rev());
            return PathBuf::from(OsString::from_vec(real.into_os_string().into_vec()));
        }
        match (existing.parent(), existing.file_name()) {
            (Some(parent), Some(name)) => {
                missing.push(name);
                existing = parent;
            }
            _ => return path.to_owned(),
        }
    }
}

pub(crate) fn addresses(entries: &Entries) -> Result<Vec<Allowed>, Fault> {
    entries
        .iter()
        .map(|entry| {
            of(entry, network::parse).map(|allowed| match allowed {
                Allowed::Path(path) => {
                    Allowed::Path(real(Path::new(OsStr::from_bytes(&path))).into_os_string().into_vec())
                }
                other => other,
            })
        })
        .collect()
}

fn calls(names: &SystemCalls) -> Result<Calls, Fault> {
    let mut calls = Calls::default();
    if let Some(default) = &names.default {
        calls.otherwise = match default.get_ref().as_str() {
            "allow" => None,
            name => Some(of(default, |_| {
                if name == "deny" { Ok(Errno::NOSYS) } else { error_named(name) }
                    .map_err(|error| format!("{error}; or write \"allow\" or \"deny\""))
            })?),
        };
    }
    for entry in &names.allow {
        let call = of(entry, |name| {
            if ESSENTIAL.contains(&name) {
                return Err(format!("{name} cannot be allowed: it would lead around the monitor"));
            }
            named(name)
        })?;
        calls.words.insert(call, Word::Allow);
    }
    for entry in &names.log {
        calls.words.insert(of(entry, named)?, Word::Log);
    }
    for entry in &names.deny {
        let (call, errno) = of(entry, |text| {
            let (name, errno) = text.split_once('=').unwrap_or((text, "EPERM"));
            Ok((named(name.trim())?, error_named(errno.trim())?))
        })?;
        calls.words.insert(call, Word::Deny(errno));
    }
    Ok(calls)
}

fn profiles(entry: Option<&Spanned<String>>) -> Result<Vec<SeccompProfile>, Fault> {
    let load = |text: &str| SeccompProfile::load(&absolute(text)?).map_err(|error| error.to_string());
    entry.map(|entry| of(entry, load)).into_iter().collect()
}

fn kept(names: Option<&Entries>) -> Result<CapabilitySet, Fault> {
    let Some(names) = names else { return Ok(capabilities::ORDINARY) };
    names.iter().try_fold(CapabilitySet::empty(), |all, name| Ok(all | of(name, capabilities::named)?))
}

fn size(entry: Option<&Spanned<String>>) -> Result<Option<u64>, Fault> {
    entry.map(|entry| of(entry, values::size)).transpose()
}

/// What of the file system is there.
fn view(section: &orrery_policy::View) -> Result<View, Fault> {
    let mut changes = BTreeMap::new();
    for entry in &section.private {
        changes.insert(of(entry, private)?, Change::Private);
    }
    for entry in &section.show {
        let path = of(entry, |text| shown(text, &changes))?;
        match changes.entry(path) {
            Entry::Vacant(place) => place.insert(Change::Shown),
            Entry::Occupied(place) if *place.get() == Change::Shown => continue,
            Entry::Occupied(_) => {
                let message = format!("{:?} is under private, too", entry.get_ref());
                return Err(Fault { span: Spanned::span(entry), message });
            }
        };
    }
    Ok(View { changes, size: size(section.size.as_ref())? })
}

fn private(text: &str) -> Result<PathBuf, String> {
    let path = real(&absolute(text)?);
    if path == Path::new("/") || path.starts_with("/proc") {
        return Err(format!("{text:?} cannot be private: programs and the monitor find each other there"));
    }
    match path.metadata() {
        Ok(found) if found.is_dir() => Ok(path),
        Ok(_) => Err(format!("{text:?} is no directory; [files] deny is for files")),
        Err(error) => Err(format!("{text:?} cannot be private: {error}")),
    }
}

fn shown(text: &str, changes: &BTreeMap<PathBuf, Change>) -> Result<PathBuf, String> {
    let path = real(&absolute(text)?);
    let within = |(above, change): (&PathBuf, &Change)| *change == Change::Private && path.starts_with(above);
    if !changes.iter().any(within) {
        return Err(format!("{text:?} is shown anyway: it lies in no directory under private"));
    }
    match path.metadata() {
        Ok(_) => Ok(path),
        Err(error) => Err(format!("{text:?} cannot be shown: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(text: &str) -> String {
        parse(text, "p").unwrap_err().to_string()
    }

    #[test]
    fn errors_have_a_place() {
        let cases = [
            ("[files]\nread = [\"/usr\",\n  \"\"]", "p:3:3: an empty path"),
            ("[files]\nread = '/usr'", "p:2:8: invalid type"),
            ("x", "p:1:2:"),
            ("[filess]", "p:1:2: unknown field `filess`"),
            ("[calls]\ndeny = [\"open\", \"opne\"]", "p:2:17: no system call is named \"opne\""),
            ("[calls]\ndeny = [\"open=EFOO\"]", "p:2:9: no error is called \"EFOO\""),
            ("[calls]\nallow = [\"io_uring_setup\"]", "p:2:10: io_uring_setup cannot be allowed"),
            ("[network]\nconnect = [\"example.org:80\"]", "p:2:12: \"example.org\" is no address"),
            ("[limits]\nmemory = \"12 apples\"", "p:2:10: \"12 apples\" is no size"),
            ("[files]\nread = [\"/a/*\"]", "p:2:9: \"/a/*\": there are no wildcards"),
            ("[files]\nread = [\"$NO_SUCH_THING/x\"]", "p:2:9: \"$NO_SUCH_THING/x\": the environment"),
            ("refusal = \"ENO\"", "p:1:11: no error"),
            ("capabilities = ['cap_kill', 'cap_fly']", "p:1:29: no capability is called \"cap_fly\""),
            ("mediation = \"never\"", "p:1:13: \"never\" is no kind of mediation"),
        ];
        for (text, message) in cases {
            assert!(wrong(text).starts_with(message), "{text}: {}", wrong(text));
        }
    }

    #[test]
    fn entries_follow_links_once() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().canonicalize().unwrap();
        std::fs::create_dir(base.join("real")).unwrap();
        std::os::unix::fs::symlink("real", base.join("link")).unwrap();
        let policy = parse(&format!("[files]\nread = ['{}']", base.join("link/new").display()), "p").unwrap();
        let rights = |path: &str| policy.rights(base.join(path).as_os_str().as_bytes());
        assert!(rights("real/new/file").contains(Rights::READ));
        assert_eq!(rights("real/other"), Rights::empty());
        assert_eq!(rights("link"), Rights::STAT);
    }

    #[test]
    fn paths_are_expanded() {
        let home = std::env::var("HOME").unwrap();
        let home = lexical(Path::new(&home));
        assert_eq!(absolute("~/x").unwrap(), home.join("x"));
        assert_eq!(absolute("${HOME}/x").unwrap(), home.join("x"));
        assert_eq!(absolute("$HOME/x").unwrap(), home.join("x"));
        assert_eq!(absolute(".").unwrap(), std::env::current_dir().unwrap());
        assert!(absolute("~other/x").is_err() && absolute("$/x").is_err() && absolute("${HOME").is_err());
    }

    /// A closure's view would be this process's.
    #[test]
    fn closures_have_no_view() {
        let policy = crate::Policy::parse("[view]\nprivate = ['/tmp']").unwrap();
        let error = crate::Guard::new(policy).closure(|| 0).unwrap_err().to_string();
        assert!(error.contains("a closure") && error.contains("leave out [view]"), "{error}");
    }

    #[test]
    fn views_that_cannot_be_are_told_with_their_place() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().canonicalize().unwrap();
        std::fs::write(base.join("file"), "").unwrap();
        for (section, message) in [
            ("private = ['/']", "p:2:12: \"/\" cannot be private"),
            ("private = ['/proc/self']", "p:2:12: \"/proc/self\" cannot be private"),
            ("private = ['BASE/file']", "p:2:12: \"BASE/file\" is no directory"),
            ("private = ['BASE/none']", "p:2:12: \"BASE/none\" cannot be private: No such file"),
            ("show = ['BASE']", "p:2:9: \"BASE\" is shown anyway"),
            (
                "private = ['BASE']\nshow = ['BASE/none']",
                "p:3:9: \"BASE/none\" cannot be shown: No such file",
            ),
            ("private = ['BASE']\nshow = ['BASE']", "p:3:9: \"BASE\" is under private, too"),
            ("private = ['BASE']\nsize = 'much'", "p:3:8: \"much\" is no size"),
            ("hide = []", "p:2:1: unknown field `hide`"),
        ] {
            let in_place = |text: &str| text.replace("BASE", base.to_str().unwrap());
            let said = wrong(&format!("[view]\n{}", in_place(section)));
            assert!(said.starts_with(&in_place(message)), "{section}: {said}");
        }
    }
}
