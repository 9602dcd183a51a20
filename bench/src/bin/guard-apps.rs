//! `make bench B=guard-apps`: whole programs under a guard, beside other sandboxes.
//!
//! Redis under redis-benchmark, bound to a CPU that its client leaves alone, with what is around it; `git status` in a tree of many files, the
//! installation of npm's and of pip's packages from files, and a build by make and gcc, from the start of the program to its end.
//! Each sandbox lets a program read the system and write where it works, and nowhere else. Redis has the network of the machine in
//! all of them, as a server has; the others have none, but for what is said of a guard's profiles in the book.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use orrery_bench::programs::{
    Redis, Run, Way, c_sources, cpu_of_programs, git_tree, need, output_of, server_case, time_of_clients,
};
use orrery_bench::{Bench, Case, Contender, Entry, Group, Pin, Skipped, Unit, machine};

const GUARD: &str = "orrery guard";
const NATIVE: &str = "native";
const BUBBLEWRAP: &str = "bubblewrap";
const FIREJAIL: &str = "firejail";
/// Debian has no package of it: `cargo install sandlock-cli`.
const SANDLOCK: &str = "sandlock";
const RIVALS: [&str; 4] = [NATIVE, BUBBLEWRAP, FIREJAIL, SANDLOCK];

/// What a guard lets Redis do: it writes nothing.
const SERVER: &str = "[files]\nread = ['/']\nexecute = ['/usr']\nwrite = ['/dev/null']\n\n[network]\nbind = ['127.0.0.1:1-65535']\n";

/// npm's packages, and the files of each.
const PACKAGES: usize = 20;
const FILES: usize = 30;
/// Wheels, and the modules of each.
const WHEELS: usize = 5;
const MODULES: usize = 60;

/// Programs are run so often at least, in a quick run and else: some take a second.
const PROGRAM_ROUNDS: (usize, usize) = (2, 5);

/// What a sandbox has to let a program do, beside reading the system.
enum Task {
    /// Serve on an address of the machine; with the policy of this file, if by a guard.
    Serve(PathBuf),
    /// Write in this directory; with the profile of this name, if by a guard.
    Work(PathBuf, &'static str),
}

fn main() -> Result<ExitCode> {
    let mut bench = Bench::new("guard-apps", "Whole programs under a guard beside other sandboxes");
    let pin = cpu_of_programs(bench.options())?;
    let time = time_of_clients(bench.options());
    let directory = tempfile::tempdir()?;
    let place = directory.path().to_owned();

    let policy = place.join("server.toml");
    fs::write(&policy, SERVER)?;
    let redis = |name: &'static str| {
        let policy = policy.clone();
        Entry::new(name, move || {
            let way = way(name, pin, &Task::Serve(policy.clone()))?;
            Redis::start(&way, time).map_err(|error| unable(name, error))
        })
    };
    let rate = |work, name| server_case(work, name).share(2);
    bench.group(
        Group::new("redis", redis(GUARD), RIVALS.map(redis))
            .cases([rate("get", "redis GET"), rate("set", "redis SET")]),
    );

    let rounds = if bench.options().quick() { PROGRAM_ROUNDS.0 } else { PROGRAM_ROUNDS.1 };
    let programs: [Program; 4] = [
        ("git status", "git", git_tree, &["git", "status", "--short"]),
        ("npm install", "node", npm_packages, &["sh", "-c", NPM]),
        ("pip install", "python", wheels, &["sh", "-c", PIP]),
        ("gcc build", "compiler", c_sources, &["make", "-s", "-B"]),
    ];
    for (case, profile, files, words) in programs {
        let entry = |name: &'static str| {
            let place = place.join(profile);
            Entry::new(name, move || {
                let place = files(&place)?;
                let way = way(name, pin, &Task::Work(place.clone(), profile))?;
                let mut run = Run::new(&way, place, words)?;
                run.measure(case, 1).map_err(|error| unable(name, error))?;
                Ok(run)
            })
        };
        bench.group(
            Group::new(case, entry(GUARD), RIVALS.map(entry))
                .case(Case::mean(case, case, Unit::Milliseconds).quick(true).rounds(rounds)),
        );
    }
    bench.run()
}

/// A case, the profile that a guard has for it, what makes its files, and the program.
type Program = (&'static str, &'static str, fn(&Path) -> Result<PathBuf>, &'static [&'static str]);

/// Another sandbox that cannot do something here is left out; that a guard cannot is an error.
fn unable(name: &str, error: anyhow::Error) -> anyhow::Error {
    if [GUARD, NATIVE].contains(&name) { error } else { Skipped(format!("{error:#}")).into() }
}

/// Returns one of the ways to run a program, on its CPU.
fn way(name: &'static str, pin: Pin, task: &Task) -> Result<Way> {
    let mut words = Vec::new();
    if let Pin::Cpu(cpu) = pin {
        need(&["taskset"])?;
        words.extend(["taskset".to_owned(), "--cpu-list".to_owned(), cpu.to_string()]);
    }
    let sandbox = match name {
        GUARD => guard(task)?,
        BUBBLEWRAP => bubblewrap(task),
        FIREJAIL => firejail(task),
        SANDLOCK => sandlock(task),
        _ => Vec::new(),
    };
    sandbox.first().map_or(Ok(()), |program| need(&[program]))?;
    words.extend(sandbox);
    let work = match task {
        Task::Serve(_) => None,
        Task::Work(place, _) => Some(place.clone()),
    };
    Ok(Way::new(name, move |program| {
        let whole: Vec<&str> = words.iter().map(String::as_str).chain(program.iter().copied()).collect();
        let (program, arguments) = whole.split_first().context("no program to execute")?;
        let mut command = Command::new(program);
        command.args(arguments);
        if let Some(place) = &work {
            // What programs write beside their work would be refused.
            command.env("HOME", place).env("TMPDIR", place).env("npm_config_cache", place.join("cache"));
        }
        Ok(command)
    }))
}

fn guard(task: &Task) -> Result<Vec<String>> {
    let orrery = machine::program_directory()?.join("orrery").display().to_string();
    let [option, value] = match task {
        Task::Serve(policy) => ["--policy", policy.to_str().context("the path of a policy is no text")?],
        Task::Work(_, profile) => ["--profile", profile],
    };
    Ok([&orrery, "guard", option, value, "--"].map(str::to_owned).to_vec())
}

fn bubblewrap(task: &Task) -> Vec<String> {
    let rest = match task {
        Task::Serve(_) => "--share-net".to_owned(),
        Task::Work(place, _) => format!("--bind {0} {0}", place.display()),
    };
    split(&format!("bwrap --die-with-parent --unshare-all --ro-bind / / --dev /dev --proc /proc {rest} --"))
}

fn firejail(task: &Task) -> Vec<String> {
    let rest = match task {
        Task::Serve(_) => String::new(),
        Task::Work(place, _) => format!("--net=none --read-write={}", place.display()),
    };
    split(&format!("firejail --quiet --noprofile --caps.drop=all --seccomp --read-only=/ {rest} --"))
}

fn sandlock(task: &Task) -> Vec<String> {
    let rest = match task {
        Task::Serve(_) => "--net-allow-bind 1-65535".to_owned(),
        Task::Work(place, _) => format!("-w {}", place.display()),
    };
    split(&format!("sandlock run -r / -w /dev {rest} --"))
}

/// Returns the words of a command without quotes.
fn split(text: &str) -> Vec<String> {
    text.split_ascii_whitespace().map(str::to_owned).collect()
}

/// What was installed is kept: ext4 searches for inodes that were not freed in the last seconds, which would be most of the time.
const NPM: &str = "mkdir -p old && if [ -d node_modules ]; then mv node_modules old/$(date +%s%N); fi && rm -f package-lock.json && \
     exec npm install --offline --no-audit --no-fund --silent";
const PIP: &str = "exec /usr/bin/python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps \
                   --no-cache-dir --target out-$(date +%s%N) wheels/*.whl";

/// Makes a package that depends on archives of others and fills npm's cache with these, unless it exists, and returns its directory.
fn npm_packages(place: &Path) -> Result<PathBuf> {
    need(&["npm", "tar"])?;
    if !place.exists() {
        let mut dependencies = Vec::new();
        for package in 0..PACKAGES {
            let files = place.join("package");
            fs::create_dir_all(&files)?;
            for file in 0..FILES {
                fs::write(
                    files.join(format!("f{file}.js")),
                    format!("module.exports = {file};\n").repeat(40),
                )?;
            }
            let name = format!("p{package}");
            fs::write(
                files.join("package.json"),
                format!("{{\"name\": \"{name}\", \"version\": \"1.0.0\", \"main\": \"f0.js\"}}\n"),
            )?;
            let archive = format!("{name}.tgz");
            output_of(Command::new("tar").args(["-czf", &archive, "package"]).current_dir(place))?;
            fs::remove_dir_all(&files)?;
            dependencies.push(format!("\"{name}\": \"file:{archive}\""));
        }
        let text = format!(
            "{{\"name\": \"work\", \"version\": \"1.0.0\", \"dependencies\": {{{}}}}}\n",
            dependencies.join(", ")
        );
        fs::write(place.join("package.json"), text)?;
        let mut install = Command::new("sh");
        install.args(["-c", NPM]).env("HOME", place).env("npm_config_cache", place.join("cache"));
        output_of(install.current_dir(place))?;
        ensure!(place.join("node_modules/p0/f0.js").exists(), "npm installed nothing");
    }
    Ok(place.to_owned())
}

/// Makes the wheels that pip installs, unless they exist, and returns the directory that has theirs.
fn wheels(place: &Path) -> Result<PathBuf> {
    if !Command::new("/usr/bin/python3")
        .args(["-m", "pip", "--version"])
        .output()
        .is_ok_and(|output| output.status.success())
    {
        return Err(Skipped("pip is not installed for /usr/bin/python3".into()).into());
    }
    if !place.exists() {
        fs::create_dir_all(place.join("wheels"))?;
        let script = format!(
            "import zipfile\n\
             for wheel in range({WHEELS}):\n \
               name = f'w{{wheel}}'\n \
               with zipfile.ZipFile(f'wheels/{{name}}-1-py3-none-any.whl', 'w') as file:\n  \
                 for module in range({MODULES}): file.writestr(f'{{name}}/m{{module}}.py', f'value = {{module}}\\n' * 40)\n  \
                 info = f'{{name}}-1.dist-info/'\n  \
                 file.writestr(info + 'METADATA', f'Metadata-Version: 2.1\\nName: {{name}}\\nVersion: 1\\n')\n  \
                 file.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n  \
                 file.writestr(info + 'RECORD', ''.join(f'{{name}},,\\n' for name in file.namelist()))\n"
        );
        output_of(Command::new("/usr/bin/python3").args(["-c", &script]).current_dir(place))?;
    }
    Ok(place.to_owned())
}
