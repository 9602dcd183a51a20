//! A service as its systemd unit describes it, made into what a pair takes.
//!
//! The unit is read from this host's files (systemd.unit(5)), whether a systemd runs or not; in the guests none does.
//! So each setting is either done there by `orrery-guest` (who runs the program, where, with which variables and
//! limits, and which directories it finds), or reported as left out, or refused with its file and line: see `settings`.
//! The files that the unit names come with the image.

mod command;
mod environment;
mod name;
mod needs;
mod search;
mod settings;
mod specifier;
mod syntax;
mod text_file;
mod tmpfiles;
mod users;
mod values;
mod words;

use std::path::Path;

use orrery_orthros_wire::{Directory, ExecCommand, ExecConfig, MainProcess, WorkingDirectory};
use orrery_sys::capability::CapabilitySet;

use crate::error::{Error, Result, file};
use crate::image::Service;
use environment::Environment;
use needs::Needs;
use search::{Found, Places};
use settings::Settings;
use specifier::Specifiers;
use syntax::Setting;
use text_file::read_text;
use users::{User, Users};

/// Settings for directories, what keeps their permissions, where they lie, and what tells the program, systemd.exec(5).
const DIRECTORIES: [(&str, &str, &str, &str); 4] = [
    ("RuntimeDirectory", "RuntimeDirectoryMode", "/run", "RUNTIME_DIRECTORY"),
    ("StateDirectory", "StateDirectoryMode", "/var/lib", "STATE_DIRECTORY"),
    ("CacheDirectory", "CacheDirectoryMode", "/var/cache", "CACHE_DIRECTORY"),
    ("LogsDirectory", "LogsDirectoryMode", "/var/log", "LOGS_DIRECTORY"),
];
const CONFIGURATION: (&str, &str, &str, &str) =
    ("ConfigurationDirectory", "ConfigurationDirectoryMode", "/etc", "CONFIGURATION_DIRECTORY");

/// All capabilities that have names, as a mask.
const ALL_CAPABILITIES: u64 = (CapabilitySet::CHECKPOINT_RESTORE.bits() << 1) - 1;

/// A service as a unit describes it.
#[derive(Clone, Debug)]
pub struct UnitService {
    /// What runs in the pair.
    pub service: Service,
    /// What is worth knowing: which files it is made of, and what is not applied.
    pub report: Vec<String>,
}

/// Reads a unit, by its name (`.service` may be left out) or by the absolute path of its file, for a pair with a disk
/// mounted there.
///
/// # Errors
///
/// [`Error::Unit`] with the file, the line and a way out where there is no such unit, or the service could not be as it
/// says; [`Error::File`].
pub fn read_unit(which: &str, disk: Option<&Path>) -> Result<UnitService> {
    let found = Places::of_system().find(which)?;
    let mut settings = Vec::new();
    for path in std::iter::once(&found.file).chain(&found.drop_ins) {
        let text = read_text(path).map_err(file("read", path))?;
        settings.extend(syntax::parse(&text, path)?);
    }
    Reading { settings: &Settings(settings), found: &found, users: Users::read()? }.service(disk)
}

/// A unit that is being read.
struct Reading<'u> {
    settings: &'u Settings,
    found: &'u Found,
    users: Users,
}

impl Reading<'_> {
    fn service(&self, disk: Option<&Path>) -> Result<UnitService> {
        let left_out = self.settings.left_out()?;
        let mut exec = ExecConfig::default();
        let remark = self.check_type(&mut exec)?;
        let mut needs = Needs::beside(disk);
        let user = self.who(&mut exec)?;
        let (uid, gid) =
            exec.credentials.as_ref().map_or((0, 0), |credentials| (credentials.uid, credentials.gid));
        self.numbers(&mut exec)?;
        let searched = self.texts("ExecSearchPath")?.join(":");
        let searched = if searched.is_empty() { command::SEARCHED } else { searched.as_str() };
        let mut environment = Environment::default();
        environment.set("PATH", searched);
        for (name, value) in user.iter().flat_map(|user| user.environment()) {
            environment.set(&name, &value);
        }
        for place in DIRECTORIES {
            exec.directories.extend(self.directories(place, (uid, gid), &mut environment)?);
        }
        for directory in self.directories(CONFIGURATION, (0, 0), &mut environment)? {
            if Path::new(&directory.path).is_dir() {
                needs.add(Path::new(&directory.path))?;
            } else {
                exec.directories.push(directory);
            }
        }
        self.variables(&mut environment, &mut needs)?;
        exec.working_directory = self.working(user.as_ref(), &mut needs)?;
        for setting in
            [self.settings.list("ReadWritePaths"), self.settings.list("ReadWriteDirectories")].concat()
        {
            for word in self.words(setting)? {
                needs.add(Path::new(word.trim_start_matches(['-', '+'])))?;
            }
        }
        let start = self.commands(&environment, searched, &mut exec)?;
        for command in exec.pre_commands.iter().chain(&exec.start_commands).chain([&start]) {
            for path in command.arguments.iter().filter_map(|word| needs::named(word)) {
                needs.add(path)?;
            }
        }
        for directory in tmpfiles::directories(&self.found.name.prefix, user.as_ref(), &self.users) {
            if exec.directories.iter().all(|other| other.path != directory.path) {
                exec.directories.push(directory);
            }
        }
        needs
            .directories
            .retain(|directory| exec.directories.iter().all(|other| other.path != directory.path));
        exec.directories.append(&mut needs.directories);
        exec.environment = Some(environment.0);
        (exec.arg0, exec.as_root) = (start.arg0.clone(), start.as_root);
        let report = self.report(&start, user.as_ref(), &needs, &exec, remark, &left_out);
        let programs = exec.pre_commands.iter().chain(&exec.start_commands);
        let programs = programs.map(|command| command.program.clone());
        let programs = programs.chain(std::mem::take(&mut needs.programs)).collect();
        let argv = std::iter::once(start.program).chain(start.arguments).collect();
        let service =
            Service { argv, programs, files: Vec::new(), copied_paths: needs.taken, host_users: true, exec };
        Ok(UnitService { service, report })
    }

    fn specifiers(&self) -> Specifiers<'_> {
        Specifiers { name: &self.found.name, file: &self.found.file }
    }

    /// Returns the value with its specifiers replaced.
    fn text(&self, setting: &Setting) -> Result<String> {
        self.specifiers().expand(&setting.value).map_err(|why| setting.refuse(why))
    }

    /// Returns all values of a setting.
    fn texts(&self, key: &str) -> Result<Vec<String>> {
        self.settings.list(key).into_iter().map(|setting| self.text(setting)).collect()
    }

    /// Returns the words of a value, their specifiers replaced.
    fn words(&self, setting: &Setting) -> Result<Vec<String>> {
        let words = words::split(&setting.value)
            .and_then(|words| words.iter().map(|word| self.specifiers().expand(word)).collect());
        words.map_err(|why| setting.refuse(why))
    }

    /// Makes sure that the service is of a kind that a guest can have; gives what is worth knowing of it.
    fn check_type(&self, exec: &mut ExecConfig) -> Result<Option<String>> {
        let bus = "the guests have no message bus; have the program do without it, and write Type=exec into a drop-in";
        match (self.settings.last("Type"), self.settings.last("BusName")) {
            (None, Some(setting)) => Err(setting.refuse(format!("that makes it Type=dbus, and {bus}"))),
            (None, None) => Ok(None),
            (Some(setting), _) => match setting.value.as_str() {
                "simple" | "exec" | "idle" => Ok(None),
                kind @ ("notify" | "notify-reload") => {
                    Ok(Some(format!("Type={kind}: nobody waits for the program's word that it is ready")))
                }
                "forking" => {
                    let pid_file =
                        self.settings.last("PIDFile").map(|setting| self.text(setting)).transpose()?;
                    // A path that is not absolute begins in /run (systemd.service(5)).
                    let pid_file =
                        pid_file.map(|path| Path::new("/run").join(path).to_string_lossy().into_owned());
                    exec.main_process = MainProcess::Left { pid_file };
                    Ok(None)
                }
                "oneshot" => {
                    exec.main_process = MainProcess::Left { pid_file: None };
                    Ok(Some(
                        "Type=oneshot: the service is the process that its commands leave running".to_owned(),
                    ))
                }
                "dbus" => Err(setting.refuse(bus)),
                _ => {
                    Err(setting
                        .refuse("there is no such type; write simple, exec, notify, forking or oneshot"))
                }
            },
        }
    }

    /// Returns the user that runs the unit.
    fn who(&self, exec: &mut ExecConfig) -> Result<Option<User>> {
        let user = self.settings.last("User").map(|setting| {
            let user = self.text(setting)?;
            self.users.user(&user).cloned().map_err(|why| setting.refuse(why))
        });
        let user = user.transpose()?;
        let number =
            |setting: &Setting, name: &str| self.users.group(name).map_err(|why| setting.refuse(why));
        let group =
            self.settings.last("Group").map(|setting| number(setting, &self.text(setting)?)).transpose()?;
        let mut more = Vec::new();
        for setting in self.settings.list("SupplementaryGroups") {
            for name in self.words(setting)? {
                more.push(number(setting, &name)?);
            }
        }
        if user.is_some() || group.is_some() || !more.is_empty() {
            exec.credentials = Some(self.users.identity(user.as_ref(), group, &more));
        }
        Ok(user)
    }

    /// Numbers, and yes or no.
    fn numbers(&self, exec: &mut ExecConfig) -> Result<()> {
        let settings = self.settings;
        let mode = |setting: &Setting| values::mode(&setting.value).map_err(|why| setting.refuse(why));
        exec.umask = Some(settings.last("UMask").map(mode).transpose()?.unwrap_or(0o022));
        let nice = |setting: &Setting| values::nice(&setting.value).map_err(|why| setting.refuse(why));
        exec.nice = settings.last("Nice").map(nice).transpose()?;
        exec.no_new_privileges = settings.is_set("NoNewPrivileges")?.unwrap_or(false);
        for setting in settings.list("AmbientCapabilities") {
            let (names, inverted) = setting
                .value
                .strip_prefix('~')
                .map_or((setting.value.as_str(), false), |names| (names, true));
            let mut set = CapabilitySet::empty();
            for name in names.split_whitespace() {
                set |= orrery_sys::capability::named(name).ok_or_else(|| {
                    setting.refuse(format!("no capability is called {name}; capabilities(7) lists them"))
                })?;
            }
            // An inverted list takes away; what it is taken from is all, where it comes first.
            let before = match exec.ambient_capabilities {
                0 if inverted => ALL_CAPABILITIES,
                before => before,
            };
            exec.ambient_capabilities = if inverted { before & !set.bits() } else { before | set.bits() };
        }
        exec.ignore_sigpipe = settings.is_set("IgnoreSIGPIPE")?.unwrap_or(true);
        exec.rlimits = vec![values::FILES];
        for setting in
            settings.0.iter().filter(|setting| setting.section == "Service" && values::is_limit(&setting.key))
        {
            // An empty one takes back those before it.
            if settings.last(&setting.key) == Some(setting) {
                let limit = values::limit(&setting.key, &setting.value).map_err(|why| setting.refuse(why))?;
                exec.rlimits.retain(|(number, ..)| *number != limit.0);
                exec.rlimits.push(limit);
            }
        }
        Ok(())
    }

    /// Returns the directories of a setting, which the program learns.
    fn directories(
        &self,
        (key, mode_key, root, variable): (&str, &str, &str, &str),
        (uid, gid): (u32, u32),
        environment: &mut Environment,
    ) -> Result<Vec<Directory>> {
        let mode = |setting: &Setting| values::mode(&setting.value).map_err(|why| setting.refuse(why));
        let mode = self.settings.last(mode_key).map(mode).transpose()?.unwrap_or(0o755);
        let mut directories = Vec::new();
        for setting in self.settings.list(key) {
            for name in self.words(setting)? {
                if name.contains(':') {
                    return Err(
                        setting.refuse("a second name is not made; leave out what comes after the colon")
                    );
                }
                let name = name.trim_end_matches('/');
                let parts_are_plain = name.split('/').all(|part| !["", ".", ".."].contains(&part));
                if !parts_are_plain {
                    return Err(setting.refuse(format!(
                        "{name}: write the path of a directory in {root}, without {root} and .."
                    )));
                }
                directories.push(Directory {
                    path: format!("{root}/{name}"),
                    mode,
                    uid,
                    gid,
                    chown_existing: true,
                });
            }
        }
        if !directories.is_empty() {
            let paths: Vec<&str> = directories.iter().map(|directory| directory.path.as_str()).collect();
            environment.set(variable, &paths.join(":"));
        }
        Ok(directories)
    }

    /// The variables that the unit sets, and the files that have them.
    fn variables(&self, environment: &mut Environment, needs: &mut Needs) -> Result<()> {
        for setting in self.settings.list("Environment") {
            for word in self.words(setting)? {
                let (name, value) = environment::assignment(&word).map_err(|why| setting.refuse(why))?;
                environment.set(name, value);
            }
        }
        for setting in self.settings.list("EnvironmentFile") {
            let text = self.text(setting)?;
            let (may_lack, path) = text.strip_prefix('-').map_or((false, text.as_str()), |path| (true, path));
            if !path.starts_with('/') || path.contains(['*', '?', '[']) {
                return Err(setting.refuse("write the absolute path of one file, in a line for each"));
            }
            let text = match read_text(Path::new(path)) {
                Ok(text) => text,
                Err(_) if may_lack => continue,
                Err(error) => {
                    return Err(
                        setting.refuse(format!("{error}; write - before a path that may not be there"))
                    );
                }
            };
            let variables = environment::parse_file(&text)
                .map_err(|why| setting.refuse(format!("in this file, {why}")))?;
            for (name, value) in variables {
                environment.set(&name, &value);
            }
            needs.add(Path::new(path))?;
        }
        for setting in self.settings.list("UnsetEnvironment") {
            for word in self.words(setting)? {
                match word.split_once('=') {
                    Some((name, value)) if environment.get(name) != Some(value) => {}
                    Some((name, _)) => environment.unset(name),
                    None => environment.unset(&word),
                }
            }
        }
        Ok(())
    }

    /// The directory that it starts in, and whether another will do.
    fn working(&self, user: Option<&User>, needs: &mut Needs) -> Result<Option<WorkingDirectory>> {
        let Some(setting) = self.settings.last("WorkingDirectory") else { return Ok(None) };
        let text = self.text(setting)?;
        let (optional, path) = text.strip_prefix('-').map_or((false, text.as_str()), |path| (true, path));
        let path = match path {
            "~" => user.map_or("/root", |user| user.home.as_str()),
            path => path,
        };
        if !path.starts_with('/') {
            return Err(setting.refuse("write an absolute path, or ~ for the user's home"));
        }
        needs.add(Path::new(path))?;
        Ok(Some(WorkingDirectory { path: path.to_owned(), optional }))
    }

    /// Returns what is run before the service, and the service.
    fn commands(
        &self,
        environment: &Environment,
        searched: &str,
        exec: &mut ExecConfig,
    ) -> Result<ExecCommand> {
        let read = |setting: &Setting| -> Result<Vec<ExecCommand>> {
            let lines = command::parse(&setting.value, &self.specifiers());
            let settled =
                lines.and_then(|lines| lines.iter().map(|line| line.settle(environment, searched)).collect());
            settled.map_err(|why: String| setting.refuse(why))
        };
        let root = self.settings.is_set("PermissionsStartOnly")?.unwrap_or(false);
        for setting in self.settings.list("ExecStartPre") {
            exec.pre_commands.extend(
                read(setting)?.into_iter().map(|it| ExecCommand { as_root: it.as_root || root, ..it }),
            );
        }
        let mut commands = Vec::new();
        for setting in self.settings.list("ExecStart") {
            commands.extend(read(setting)?.into_iter().map(|command| (setting, command)));
        }
        // Of several commands (Type=oneshot) the last one is waited for like a program that goes into the background.
        if matches!(self.settings.last("Type"), Some(kind) if kind.value == "oneshot") {
            let last = commands.len().saturating_sub(1);
            exec.start_commands.extend(commands.drain(..last).map(|(_, command)| command));
        }
        match (commands.pop(), commands.is_empty()) {
            (Some((_, command)), true) => Ok(command),
            (Some((setting, _)), false) => Err(setting.refuse(
                "this is another command, and a service is one; take back the others with an empty ExecStart= before it",
            )),
            (None, _) => Err(Error::Unit {
                place: self.found.file.display().to_string(),
                why: "it has no ExecStart=, and so nothing to run; name a service that stays".to_owned(),
            }),
        }
    }

    fn report(
        &self,
        start: &ExecCommand,
        user: Option<&User>,
        needs: &Needs,
        exec: &ExecConfig,
        remark: Option<String>,
        left_out: &[&str],
    ) -> Vec<String> {
        let list = |words: Vec<String>| words.join(", ");
        let mut unit = format!("{} is {}", self.found.name.full, self.found.file.display());
        if !self.found.drop_ins.is_empty() {
            let paths = self.found.drop_ins.iter().map(|path| path.display().to_string()).collect();
            unit.push_str(&format!(" with {}", list(paths)));
        }
        let who = user.filter(|_| !start.as_root).map_or("root", |user| user.name.as_str());
        let words: Vec<&str> =
            std::iter::once(&start.program).chain(&start.arguments).map(String::as_str).collect();
        unit.push_str(&format!(": {} runs {}", who, words.join(" ")));
        let mut report = vec![unit];
        if !needs.taken.is_empty() {
            report.push(format!(
                "taken along: {}",
                list(needs.taken.iter().map(|path| path.display().to_string()).collect())
            ));
        }
        if !exec.directories.is_empty() {
            report.push(format!(
                "directories made: {}",
                list(exec.directories.iter().map(|directory| directory.path.clone()).collect())
            ));
        }
        report.extend(remark);
        if !left_out.is_empty() {
            report.push(format!("not applied: {}", left_out.join(", ")));
        }
        report
    }
}

#[cfg(test)]
mod tests;
