//! What `make install` installs: that strangers' projects find the library, that programs find their helpers, and that
//! nothing is left when it is removed.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

/// A program that uses the library, and prints 42 where it works.
const PROGRAM: &str = r#"
#include <orrery/orrery.h>
#include <stdio.h>
#include <stdlib.h>

int main(void)
{
	orrery_rollback_snapshot_t start;
	static volatile int number = 41;
	int round = orrery_rollback_snapshot(&start);

	if (round < 0) {
		fprintf(stderr, "%s\n", orrery_last_error());
		return EXIT_FAILURE;
	}
	number++;
	if (round == 0)
		orrery_rollback_resume(start, 1);
	printf("%d\n", number);
	return EXIT_SUCCESS;
}
"#;

/// A library whose state is a counter, and a program that calls it in two instances.
const COUNTER: &str = "static int count;\nint next(void);\nint next(void) { return ++count; }\n";
const INSTANCES: &str = r#"
#include <orrery/instance.h>
#include <stdio.h>

int main(int argc, char **argv)
{
	struct orrery_instance_library *library = orrery_instance_load(argv[argc - 1], NULL);
	struct orrery_instance *one, *two;

	if (!library || !(one = orrery_instance_create(library)) || !(two = orrery_instance_create(library))) {
		fprintf(stderr, "%s\n", orrery_last_error());
		return 1;
	}
	int (*next)(void) = (int (*)(void))orrery_instance_symbol(library, "next");
	orrery_instance_enter(one);
	next();
	int first = next();
	orrery_instance_leave(one);
	orrery_instance_enter(two);
	printf("%d %d\n", first, next());
	orrery_instance_leave(two);
	return 0;
}
"#;

struct Installed {
    _directory: tempfile::TempDir,
    /// Below it is everything.
    prefix: PathBuf,
    stage: PathBuf,
    /// A project that uses the library.
    project: PathBuf,
}

fn succeed(command: &mut Command) -> String {
    let output: Output = command.stdin(Stdio::null()).output().unwrap();
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{error}", output.status);
    out.into_owned()
}

/// Returns all files below a directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(files(&path));
        } else {
            found.push(path);
        }
    }
    found
}

impl Installed {
    /// Returns what all tests but the one that removes it look at.
    fn shared() -> &'static Self {
        static SHARED: OnceLock<Installed> = OnceLock::new();
        SHARED.get_or_init(Self::new)
    }

    /// Installs the same once more, elsewhere.
    fn again(&self) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (prefix, project) = (directory.path().join("prefix"), directory.path().join("project"));
        let again = Self { _directory: directory, prefix, stage: self.stage.clone(), project };
        again.script("install", &[]);
        again
    }

    fn new() -> Self {
        for library in [
            "liborrery.a",
            "liborrery_signer.a",
            "liborthros.a",
            "orrery-guest",
            "orrery-orthros-load",
            "orrery-warm-python",
            "orrery-warm-http",
            "orrery-orc-registry",
        ] {
            // Panics with the command that builds it.
            let _ = orrery_testing::built(library);
        }
        let directory = tempfile::tempdir().unwrap();
        let (prefix, stage) = (directory.path().join("prefix"), directory.path().join("stage"));
        let project = directory.path().join("project");
        fs::create_dir(&project).unwrap();
        fs::write(project.join("main.c"), PROGRAM).unwrap();
        let installed = Self { _directory: directory, prefix, stage, project };
        installed.script("stage", &[]);
        installed.script("install", &[]);
        installed
    }

    fn script(&self, name: &str, options: &[&str]) {
        let mut command = Command::new(orrery_testing::root().join("packaging").join(name));
        command.args(options).arg(orrery_testing::target_directory()).arg(&self.stage);
        succeed(command.env("PREFIX", &self.prefix));
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.prefix.join("bin").join(name));
        command.env_remove("ORRERY_LIBEXEC");
        command
    }

    /// Lets build tools find the library.
    fn finds(&self, command: &mut Command) -> String {
        command.env("PKG_CONFIG_PATH", self.prefix.join("lib/pkgconfig"));
        command.env("CMAKE_PREFIX_PATH", &self.prefix);
        succeed(command.current_dir(&self.project))
    }

    /// Runs a program of the project, which must work.
    fn works(&self, program: &str) {
        let output = Command::new(self.project.join(program))
            .env("LD_LIBRARY_PATH", self.prefix.join("lib"))
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        if error.contains("userfaultfd") || error.contains("not permitted") {
            orrery_testing::skipped!("running {program}: {error}");
            return;
        }
        assert_eq!(String::from_utf8_lossy(&output.stdout), "42\n", "{program}: {error}");
    }
}

#[test]
fn projects_of_all_kinds_find_the_library() {
    let installed = Installed::shared();
    if orrery_testing::is_there("pkg-config") {
        let build = "cc -Wall -Wextra -Werror main.c -o plain $(pkg-config --cflags --libs orrery)";
        installed.finds(Command::new("sh").args(["-ec", build]));
        installed.works("plain");
        let needed = succeed(Command::new("readelf").arg("-d").arg(installed.project.join("plain")));
        assert!(needed.contains("[liborrery.so.0]"), "{needed}");
        let build = "cc main.c -o static $(pkg-config --cflags orrery) \
            \"$(pkg-config --variable=libdir orrery)/liborrery.a\" -lgcc_s -lm";
        installed.finds(Command::new("sh").args(["-ec", build]));
        installed.works("static");
    }
    if orrery_testing::is_there("cmake") {
        let lists = "cmake_minimum_required(VERSION 3.16)\nproject(user C)\nfind_package(Orrery 0.1 REQUIRED)\n\
            add_executable(shared main.c)\ntarget_link_libraries(shared Orrery::orrery)\n\
            add_executable(archive main.c)\ntarget_link_libraries(archive Orrery::orrery_static)\n";
        fs::write(installed.project.join("CMakeLists.txt"), lists).unwrap();
        installed.finds(Command::new("cmake").args(["-B", "cmake"]));
        installed.finds(Command::new("cmake").args(["--build", "cmake"]));
        installed.works("cmake/shared");
        installed.works("cmake/archive");
        // An interface that is not this one is refused.
        fs::write(installed.project.join("CMakeLists.txt"), lists.replace("Orrery 0.1", "Orrery 0.2"))
            .unwrap();
        let mut other = Command::new("cmake");
        other.args(["-B", "other"]).env("CMAKE_PREFIX_PATH", &installed.prefix);
        let refused = other.current_dir(&installed.project).output().unwrap();
        assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("0.1.0"));
    }
    if orrery_testing::is_there("meson") {
        let build =
            "project('user', 'c')\nexecutable('user', 'main.c', dependencies: dependency('orrery'))\n";
        fs::write(installed.project.join("meson.build"), build).unwrap();
        installed.finds(Command::new("meson").args(["setup", "meson"]));
        installed.finds(Command::new("meson").args(["compile", "-C", "meson"]));
        installed.works("meson/user");
    }
}

#[test]
fn the_installed_compiler_makes_libraries_that_have_instances() {
    let installed = Installed::shared();
    let compiler = installed.prefix.join("bin/orrery-cc");
    if !compiler.exists() {
        orrery_testing::skipped!("there is no LLVM of 14 to 19 with headers");
        return;
    }
    let Some(version) = orrery_testing::cls::version() else {
        orrery_testing::skipped!("there is no clang of 14 to 19 with the headers of LLVM");
        return;
    };
    fs::write(installed.project.join("counter.c"), COUNTER).unwrap();
    fs::write(installed.project.join("instances.c"), INSTANCES).unwrap();
    let clang = format!("clang-{version}");
    let build = "-O2 -fPIC -shared counter.c -o libcounter.so";
    succeed(
        Command::new(compiler)
            .args(build.split(' '))
            .current_dir(&installed.project)
            .env("ORRERY_CLANG", clang)
            .env_remove("ORRERY_CLS_LIB"),
    );
    let build = "cc -Wall -Wextra -Werror instances.c -o instances $(pkg-config --cflags --libs orrery)";
    installed.finds(Command::new("sh").args(["-ec", build]));
    let mut program = Command::new(installed.project.join("instances"));
    program.arg(installed.project.join("libcounter.so")).env("LD_LIBRARY_PATH", installed.prefix.join("lib"));
    assert_eq!(succeed(&mut program), "2 1\n");
    for page in ["orrery-cc.1", "orrery-c++.1"] {
        assert!(installed.prefix.join("share/man/man1").join(page).is_file(), "{page}");
    }
}

#[test]
fn the_shared_library_exports_versions_of_its_own_names_only() {
    let installed = Installed::shared();
    for library in ["liborrery.so.0", "liborthros.so.0"] {
        let path = installed.prefix.join("lib").join(library);
        let dynamic = succeed(Command::new("readelf").args(["-dW"]).arg(&path));
        assert!(dynamic.contains(&format!("soname: [{library}]")), "{dynamic}");
        let names = succeed(Command::new("nm").args(["-D", "--defined-only"]).arg(&path));
        let names: Vec<&str> = names.lines().filter_map(|line| line.split_whitespace().last()).collect();
        assert!(names.len() > 3, "{names:?}");
        for name in names {
            assert!(
                name == "ORRERY_0" || name.starts_with("orrery_") && name.ends_with("@@ORRERY_0"),
                "{name}"
            );
        }
    }
}

#[test]
fn programs_find_their_helpers_and_have_manual_pages_and_completions() {
    let installed = Installed::shared();
    assert!(succeed(installed.program("orrery").arg("--version")).starts_with("orrery 0."));
    let mut served = installed.program("orrery");
    let socket = installed.project.join("socket");
    served
        .args(["warm", "serve", "--python", "--workers", "1", "--socket"])
        .arg(&socket)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let mut server = served.stderr(Stdio::piped()).spawn().unwrap();
    orrery_testing::eventually("the server listens or has ended", || {
        socket.exists() || server.try_wait().unwrap().is_some()
    });
    let script = ["warm", "run", "--wait=60s", "-c", "print(6 * 7)"];
    let output = installed.program("orrery").args(script).env("ORRERY_WARM", &socket).output().unwrap();
    let _ = server.kill();
    let said = server.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "42\n", "{output:?} {said:?}");

    let man = installed.prefix.join("share/man/man1");
    for page in [
        "orrery",
        "orrery-guard",
        "orrery-warm-serve",
        "orrery-warm-http",
        "orrery-orc-pull",
        "orrery-orthros-up",
    ] {
        let text = fs::read_to_string(man.join(format!("{page}.1"))).unwrap();
        assert!(text.contains(".SH NAME") && text.contains(".SH DESCRIPTION"), "{page}");
    }
    assert!(!man.join("orrery-generate.1").exists(), "hidden commands have no page");
    let bash = installed.prefix.join("share/bash-completion/completions/orrery");
    let script = format!(
        ". {}; COMP_WORDS=(orrery gua); COMP_CWORD=1; _orrery orrery gua orrery; echo \"${{COMPREPLY[@]}}\"",
        bash.display()
    );
    assert_eq!(succeed(Command::new("bash").args(["-c", &script])).trim(), "guard");
    // The provider that was installed with it is the one that it names.
    let configuration = succeed(installed.program("orrery").args(["vault", "conf"]));
    let module = installed.prefix.join("lib/orrery/orrery.so");
    assert!(configuration.contains(&format!("module = {}\n", module.display())), "{configuration}");
    assert!(module.is_file() && module.with_file_name("orrery-vault").is_file());
    let units = installed.prefix.join("lib/systemd/system");
    let warm = fs::read_to_string(units.join("orrery-warm.service")).unwrap();
    assert!(
        warm.contains(&format!("ExecStart={}/bin/orrery warm serve", installed.prefix.display())),
        "{warm}"
    );
    let http = fs::read_to_string(units.join("orrery-warm-http.service")).unwrap();
    assert!(
        http.contains(&format!("ExecStart={}/bin/orrery warm http", installed.prefix.display())),
        "{http}"
    );
    // Its program is found where it is installed.
    let http = succeed(installed.program("orrery").args(["warm", "http", "--help"]));
    assert!(http.contains("--directory"), "{http}");
    assert!(installed.prefix.join("libexec/orrery/orrery-warm-http").is_file());
    let registry = installed.prefix.join("libexec/orrery/orrery-orc-registry");
    assert!(succeed(Command::new(registry).args(["pull", "--help"])).contains("--platform"));
}

#[test]
fn what_was_installed_is_removed_and_nothing_else() {
    let installed = Installed::shared().again();
    assert!(files(&installed.prefix).len() > 50);
    let other = installed.prefix.join("lib/liborrery-of-someone-else.so");
    fs::write(&other, "").unwrap();
    installed.script("install", &["--uninstall"]);
    assert_eq!(files(&installed.prefix), [other]);
}
