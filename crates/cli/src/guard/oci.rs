//! `orrery guard oci`: containers whose programs start beneath a guard, whatever starts them.
//!
//! Engines start containers by an OCI runtime such as runc. This stands in for it: when a container is to be created, the guard's
//! program and the policy are mounted into it, and the guard is what the runtime starts; further processes (`exec`) get a guard
//! of their own. What cannot be guarded is not started.
//!
//! The guard's program runs in containers that have no C library, or another one: it brings the files that this process is made of,
//! the loader among them, which is started by its name. Nothing of the container is loaded into it: the variables of loaders are the
//! program's only, and the loader's copy does not read `/etc/ld.so.preload`.

use std::ffi::{OsStr, OsString};
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Args;
use orrery_monitor::SeccompProfile;
use orrery_monitor::container::{self, Additions, DIRECTORY};
use serde_json::{Value, json};

use crate::oci_request::{self as request, Request, load, save};

/// Stand in for an OCI runtime: the programs of containers that it creates run under guard.
///
/// Name a script that calls this where the engine wants a runtime: `exec orrery guard oci --policy FILE -- "$@"`.
#[derive(Args)]
pub(super) struct Arguments {
    /// The policy of containers that name none
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Where the policies are that containers name: the annotation orrery.guard.policy=NAME means DIR/NAME.toml
    #[arg(long, value_name = "DIR")]
    policies: Option<PathBuf>,
    /// The runtime that does the work
    #[arg(long, default_value = "runc")]
    runtime: PathBuf,
    /// Say nothing of refusals, which a container's standard error has otherwise
    #[arg(long)]
    quiet: bool,
    /// The runtime's own options, command and arguments, as the engine gives them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// What names a container's policy.
const ANNOTATION: &str = "orrery.guard.policy";
/// Where a bundle has the guard's files.
const FILES: &str = "orrery-guard";
const PROGRAM: &str = "orrery";
const LOADER: &str = "ld.so";
const POLICY: &str = "policy.toml";
const PROFILE: &str = "seccomp.json";
/// The words that start a guard in the container, without the program's.
const COMMAND: &str = "command.json";
/// The configuration before and after it was changed.
const BEFORE: &str = "before.json";
const AFTER: &str = "after.json";
/// Longer policies are none.
const LONGEST: u64 = 1 << 20;

/// Commands of runtimes that start nothing in a container but what was created.
const HARMLESS: [&str; 16] = [
    "",
    "checkpoint",
    "events",
    "features",
    "help",
    "kill",
    "list",
    "pause",
    "ps",
    "resume",
    "spec",
    "start",
    "state",
    "update",
    "version",
    "delete",
];

/// Does it; returns only where it cannot.
pub(super) fn run(arguments: &Arguments) -> Result<()> {
    let Err(error) = guarded(arguments);
    // The engine reads what the runtime has logged.
    let log = request::value(&arguments.arguments, "--log", "--log");
    if let Some(mut log) =
        log.and_then(|path| std::fs::OpenOptions::new().append(true).create(true).open(path).ok())
    {
        let line = json!({"level": "error", "msg": format!("orrery guard oci: {error:#}")});
        let _ = writeln!(log, "{line}");
    }
    Err(error)
}

fn guarded(arguments: &Arguments) -> Result<std::convert::Infallible> {
    match request::read(&arguments.arguments) {
        Request::Create { bundle, .. } => {
            let shown = bundle.display().to_string();
            create(arguments, &bundle).with_context(|| format!("cannot guard the container of {shown}"))?;
        }
        Request::Execute { global, process, container } => {
            execute(&arguments.runtime, &global, &process, &container).with_context(|| {
                format!("cannot guard a process in the container {}", container.display())
            })?;
        }
        Request::ExecuteWords => bail!(
            "cannot guard a process that the command line describes; describe it in a file, as engines do: exec --process FILE"
        ),
        Request::Delete(_) => (),
        Request::Other(command) if HARMLESS.iter().any(|name| command == *name) => (),
        Request::Other(command) => bail!(
            "cannot guard what {} starts; call the runtime itself where that is not to be guarded",
            command.display()
        ),
    }
    let error = Command::new(&arguments.runtime).args(&arguments.arguments).exec();
    Err(anyhow!("cannot run {}: {error}", arguments.runtime.display()))
}

/// Changes a bundle so that its program starts beneath the guard.
fn create(arguments: &Arguments, bundle: &Path) -> Result<()> {
    let bundle =
        bundle.canonicalize().with_context(|| format!("cannot find the bundle {}", bundle.display()))?;
    let (path, files) = (bundle.join("config.json"), bundle.join(FILES));
    let mut config = load(&path)?;
    // A bundle that was changed already, for a container that could not be created perhaps.
    if load(&files.join(AFTER)).is_ok_and(|after| after == config) {
        config = load(&files.join(BEFORE))?;
    }
    let policy = policy_of(arguments, &config)?;
    check_root(&bundle, &config)?;
    let _ = std::fs::remove_dir_all(&files);
    std::fs::create_dir(&files).with_context(|| format!("cannot make {}", files.display()))?;
    write(&files.join(POLICY), policy.as_bytes())?;
    let before = config.clone();
    let mut additions = program(&files)?;
    additions.files.push((files.join(POLICY), POLICY.to_owned()));
    additions.command.extend(["--policy".to_owned(), format!("{DIRECTORY}/{POLICY}")]);
    if arguments.quiet {
        additions.command.push("--quiet".to_owned());
    }
    // The monitor needs calls that profiles refuse: so the guard holds the profile, of which only the program is to have less.
    let profile = config["linux"]["seccomp"].take();
    let text = profile.to_string();
    if !profile.is_null() && SeccompProfile::parse(&text, "linux.seccomp").is_ok() {
        write(&files.join(PROFILE), text.as_bytes())?;
        additions.files.push((files.join(PROFILE), PROFILE.to_owned()));
        additions.command.extend(["--seccomp".to_owned(), format!("{DIRECTORY}/{PROFILE}")]);
        config["linux"].as_object_mut().map(|linux| linux.remove("seccomp"));
    } else {
        config["linux"]["seccomp"] = profile;
    }
    container::edit(&mut config, &additions).map_err(|message| anyhow!(message))?;
    save(&files.join(COMMAND), &json!(additions.command))?;
    save(&files.join(BEFORE), &before)?;
    save(&files.join(AFTER), &config)?;
    save(&path, &config)
}

/// Returns the text of a container's policy.
fn policy_of(arguments: &Arguments, config: &Value) -> Result<String> {
    let path = match (&config["annotations"][ANNOTATION], &arguments.policies, &arguments.policy) {
        (Value::Null, _, Some(path)) => path.clone(),
        (Value::Null, ..) => {
            bail!("it has no annotation {ANNOTATION}, and --policy names no policy for such containers")
        }
        (Value::String(name), Some(directory), _) => {
            let is_plain = !name.starts_with('.')
                && !name.is_empty()
                && name.chars().all(|letter| letter.is_ascii_alphanumeric() || "-_.".contains(letter));
            if !is_plain {
                bail!("annotation {ANNOTATION} {name:?}: a name has letters, digits, '-', '_' and '.' only");
            }
            directory.join(format!("{name}.toml"))
        }
        (name, None, _) => {
            bail!("annotation {ANNOTATION} {name}: --policies says not where such policies are")
        }
        (other, ..) => bail!("annotation {ANNOTATION} {other}: it is no text"),
    };
    let shown = path.display().to_string();
    let length = std::fs::metadata(&path).with_context(|| format!("cannot read the policy {shown}"))?.len();
    if length > LONGEST {
        bail!("cannot read the policy {shown}: it is longer than a MiB");
    }
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read the policy {shown}"))?;
    check_policy(&text, &shown)?;
    Ok(text)
}

/// Checks that the meaning of no path depends on the container. Other errors of the policy are reported when the guard starts.
fn check_policy(text: &str, name: &str) -> Result<()> {
    let document = orrery_policy::Document::parse(text, name)?;
    document.refuse(&orrery_policy::Section::RULES, "a guard allows by lists and knows no rules")?;
    let (files, view, calls) = (document.files(), document.view(), document.calls());
    let lists = [
        &files.stat,
        &files.list,
        &files.read,
        &files.write,
        &files.create,
        &files.own,
        &files.execute,
        &files.deny,
        &files.read_only,
        &files.except,
    ];
    let of_view = view.into_iter().flat_map(|view| view.private.iter().chain(&view.show));
    let paths = lists.into_iter().flatten().chain(of_view);
    for path in paths {
        let text = path.get_ref();
        if !text.starts_with('/') || text.contains('$') {
            let message =
                format!("{text:?}: what it means in a container the container decides; write a full path");
            return Err(document.error(orrery_policy::Fault { span: path.span(), message }).into());
        }
    }
    if let Some(path) = &calls.seccomp {
        let message = "the file would be one of the container's; have the engine name the profile".to_owned();
        return Err(document.error(orrery_policy::Fault { span: path.span(), message }).into());
    }
    Ok(())
}

/// Checks that nothing of the image is in the guard's place.
fn check_root(bundle: &Path, config: &Value) -> Result<()> {
    let root = bundle.join(config["root"]["path"].as_str().unwrap_or("rootfs"));
    let place = root.join(DIRECTORY.trim_start_matches('/'));
    match std::fs::symlink_metadata(&place) {
        Ok(found) if !found.is_dir() => {
            bail!("{} is no directory, where the guard's files are to be", place.display())
        }
        _ => Ok(()),
    }
}

/// Returns the files that this program is made of, and the words that start it as a guard in a container.
fn program(files: &Path) -> Result<Additions> {
    let program = std::fs::read_link("/proc/self/exe").context("cannot find this program")?;
    let inside = |name: &str| format!("{DIRECTORY}/{name}");
    let mut additions = Additions { files: vec![(program.clone(), PROGRAM.to_owned())], command: Vec::new() };
    // SAFETY: it reads what the kernel gave this process.
    let base = unsafe { libc::getauxval(libc::AT_BASE) };
    if base != 0 {
        let maps = std::fs::read_to_string("/proc/self/maps").context("cannot read /proc/self/maps")?;
        let mut loader = None;
        for line in maps.lines() {
            let path = line.splitn(6, ' ').nth(5).map(str::trim_start).filter(|path| path.starts_with('/'));
            let Some(path) = path.map(PathBuf::from).filter(|path| *path != program) else { continue };
            let starts = line.split_once('-').and_then(|(start, _)| u64::from_str_radix(start, 16).ok());
            if starts == Some(base) {
                loader = Some(path.clone());
            }
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default().to_owned();
            let is_library = name.contains(".so") && !additions.files.iter().any(|(_, known)| *known == name);
            if is_library {
                additions.files.push((path, name));
            }
        }
        let loader = loader.context("cannot find the loader of this program")?;
        additions.files.retain(|(path, _)| *path != loader);
        write(&files.join(LOADER), &without_preload(&loader)?)?;
        additions.files.push((files.join(LOADER), LOADER.to_owned()));
        additions.command.extend([inside(LOADER), "--inhibit-cache".to_owned()]);
        additions.command.extend(["--library-path".to_owned(), DIRECTORY.to_owned()]);
    }
    additions.command.extend([inside(PROGRAM), "guard".to_owned()]);
    Ok(additions)
}

/// Returns a loader that looks for no libraries in a file of the container's: in its place it looks for one that is never there.
fn without_preload(loader: &Path) -> Result<Vec<u8>> {
    const LIST: &[u8] = b"/etc/ld.so.preload\0";
    const NOTHING: &[u8] = b"/.orrery-guard/pre\0";
    let shown = loader.display();
    let mut bytes = std::fs::read(loader).with_context(|| format!("cannot read the loader {shown}"))?;
    let places: Vec<usize> =
        bytes.windows(LIST.len()).enumerate().filter(|(_, part)| *part == LIST).map(|(at, _)| at).collect();
    if places.is_empty() {
        bail!(
            "cannot keep the loader {shown} from reading /etc/ld.so.preload: it does not name that; use a static orrery"
        );
    }
    for at in places {
        bytes[at..at + NOTHING.len()].copy_from_slice(NOTHING);
    }
    Ok(bytes)
}

/// Changes the description of a further process, so that it starts beneath a guard.
fn execute(runtime: &Path, global: &[OsString], process: &Path, container: &OsStr) -> Result<()> {
    let state = request::state(runtime, global, container)?;
    let bundle = state["bundle"].as_str().context("the container has no bundle")?;
    let files = Path::new(bundle).join(FILES);
    let command = load(&files.join(COMMAND)).context("the container was not created under guard")?;
    let after = load(&files.join(AFTER))?;
    let mounts = after["mounts"].as_array().context("the container's mounts are not known")?;
    let root = format!("/proc/{}/root", state["pid"].as_i64().context("the container has no process")?);
    // The names must mean what they meant when it was created.
    let inside =
        |mount: &&Value| mount["destination"].as_str().is_some_and(|path| path.starts_with(DIRECTORY));
    for mount in mounts.iter().filter(inside).filter(|mount| mount["type"] == "bind") {
        let name = mount["destination"].as_str().unwrap_or_default();
        let source = mount["source"].as_str().unwrap_or_default();
        let number = |found: std::fs::Metadata| (found.dev(), found.ino());
        let is = std::fs::symlink_metadata(format!("{root}{name}")).map(number);
        let was = std::fs::metadata(source).map(number);
        if !matches!((is, was), (Ok(is), Ok(was)) if is == was) {
            bail!("{name} of the container is not {source}, with which it was created");
        }
    }
    let command: Vec<String> = serde_json::from_value(command)?;
    let mut described = load(process)?;
    container::edit_process(&mut described, &command).map_err(|message| anyhow!(message))?;
    save(process, &described)
}

/// Writes a file that every user of the container may read.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes)
        .and_then(|()| std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_that_a_container_could_change_are_refused() {
        for (policy, told) in [
            ("[files]\nread = ['/usr', '~/x']", "p:2:17: \"~/x\": what it means"),
            ("[files]\nwrite = ['$X/a']", "p:2:10: \"$X/a\""),
            ("[files]\nexecute = ['/opt/$X']", "p:2:12: \"/opt/$X\""),
            ("[files]\ncreate = ['.']", "p:2:11: \".\""),
            ("[view]\nprivate = ['~']", "p:2:12: \"~\""),
            ("[calls]\nseccomp = '/p.json'", "p:2:11: the file would be"),
            ("[[rule]]\ncall = 'getppid'\nreturn = 1", "knows no rules"),
            ("[filess]", "unknown field `filess`"),
        ] {
            let error = check_policy(policy, "p").unwrap_err().to_string();
            assert!(error.contains(told), "{policy}: {error}");
        }
        check_policy("[files]\nread = ['/usr']\n[view]\nprivate = ['/tmp']", "p").unwrap();
    }

    #[test]
    fn loaders_are_kept_from_the_containers_list() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"a\0/etc/ld.so.preload\0b").unwrap();
        assert_eq!(without_preload(file.path()).unwrap(), b"a\0/.orrery-guard/pre\0b");
        std::fs::write(file.path(), b"no such name").unwrap();
        assert!(without_preload(file.path()).unwrap_err().to_string().contains("use a static orrery"));
    }
}
