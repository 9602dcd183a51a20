//! Which interpreter a server has, and what it takes from the surroundings of its server and of its clients.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{PYTHON, Server, Way, python, ran, serve_command, told, ways};

fn way() -> Way {
    ways().pop().unwrap()
}

/// Starts a server that must not start; what it says.
fn refused(named: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(orrery_testing::built("orrery"));
    let socket = directory.path().join("socket");
    command
        .args(["warm", "serve", &format!("--python={named}"), "--socket"])
        .arg(&socket)
        .stdin(Stdio::null());
    let output = command.output().unwrap();
    assert!(!output.status.success(), "{named}: {output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn an_interpreter_that_is_not_the_one_named_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    assert!(refused("/nonexistent/python3").contains("cannot start the interpreter /nonexistent/python3"));
    assert!(refused(&path("")).contains("cannot start the interpreter"));
    assert!(refused("no-such-python").contains("cannot find the interpreter no-such-python in PATH"));
    orrery_testing::write_program(path("old"), "#!/bin/sh\nprintf '2.7.18 (default)'\n");
    let said = refused(&path("old"));
    assert!(said.contains("is Python 2.7.18 (default), and this build of orrery has 3"), "{said}");
    assert!(said.contains("PYO3_PYTHON"), "{said}");
    orrery_testing::write_program(
        path("broken"),
        "#!/bin/sh\necho 'no module named encodings' >&2; exit 1\n",
    );
    assert!(refused(&path("broken")).contains("no module named encodings"));
    // Those of this machine that are other builds.
    let home = std::env::var_os("HOME").unwrap_or_default();
    for entry in
        fs::read_dir(Path::new(&home).join(".pyenv/versions")).into_iter().flatten().flatten().take(2)
    {
        let python = entry.path().join("bin/python3");
        if python.exists() {
            let said = refused(python.to_str().unwrap());
            assert!(said.contains("and this build of orrery has"), "{said}");
        }
    }
}

#[test]
fn a_virtual_environment_is_taken_by_name_and_from_the_environment() {
    let directory = tempfile::tempdir().unwrap();
    let environment = directory.path().join("venv");
    // As `python3 -m venv --without-pip` makes it.
    fs::create_dir_all(environment.join("bin")).unwrap();
    fs::write(environment.join("pyvenv.cfg"), "home = /usr/bin\ninclude-system-site-packages = false\n")
        .unwrap();
    std::os::unix::fs::symlink(PYTHON, environment.join("bin/python3")).unwrap();
    let expected = format!("{}\n", environment.display());
    let prefix = ["-c", "import sys; print(sys.prefix)"];
    let named = format!("--python={}", environment.join("bin/python3").display());
    for (option, variable) in [(named.as_str(), ""), ("--python", environment.to_str().unwrap())] {
        let socket = directory.path().join("socket");
        let mut command = Command::new(orrery_testing::built("orrery"));
        common::settle_environment(&mut command).args(["warm", "serve", option, "--socket"]).arg(&socket);
        command.env("VIRTUAL_ENV", variable).stdin(Stdio::null()).stderr(Stdio::null());
        let mut server = command.spawn().unwrap();
        let client = || {
            let mut command = Command::new(orrery_testing::built("orrery"));
            common::settle_environment(&mut command).args(["warm", "run", "--socket"]).arg(&socket);
            command
        };
        orrery_testing::eventually("the server answers", || {
            client().args(["-c", ""]).output().unwrap().status.success()
        });
        assert_eq!(ran(client().args(prefix), b"").out(), expected, "{option} {variable}");
        // Also when the server is busy, gone, or asked for what it cannot do.
        let mut optimised = client();
        optimised.args(["--fallback", "-O", "-c", "import sys; print(sys.prefix, sys.flags.optimize)"]);
        assert_eq!(ran(&mut optimised, b"").out(), format!("{} 1\n", environment.display()));
        common::signal(i32::try_from(server.id()).unwrap(), libc::SIGTERM);
        server.wait().unwrap();
        assert_eq!(
            ran(client().arg("--fallback").args(prefix), b"").out(),
            expected,
            "after the server's end"
        );
    }
}

#[test]
fn every_option_falls_back_or_is_refused() {
    let server = Server::start(way(), &[]);
    let show = "import sys; print(sys.flags, sys._xoptions)";
    for options in [&["-I"][..], &["-X", "dev"], &["-O"], &["-E"], &["-s"], &["-bb"], &["-q", "-v", "-v"]] {
        let program = [options, &["-c", show]].concat();
        let warm = ran(server.orrery(&["run", "--fallback"]).args(&program), b"");
        let cold = ran(python(&program).env_remove("PYTHONDONTWRITEBYTECODE"), b"");
        assert_eq!(warm.out(), cold.out(), "{options:?}");
        let alone = ran(&mut server.run(&program), b"");
        assert_eq!(told(alone.status), "exit 76", "{options:?}");
        assert!(alone.err().starts_with("orrery: "), "{}", alone.err());
    }
    let version = ran(&mut server.orrery(&["run", "--fallback", "--version"]), b"");
    assert_eq!(version.out(), ran(&mut python(["--version"]), b"").out());
}

/// What depends on the locale.
const ENCODINGS: &str = "import sys, locale, os\n\
    print(sys.flags.utf8_mode, locale.getpreferredencoding(), sys.stdout.encoding, sys.stdout.errors, sys.stdin.errors,\n\
    open('/dev/null').encoding, sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), os.environ.get('LC_CTYPE'),\n\
    locale.getlocale())";

#[test]
fn the_utf8_mode_is_that_of_python3() {
    let server = Server::start(way(), &[]);
    for variables in [
        &[][..],
        &[("LANG", "C")],
        &[("LANG", "")],
        &[("LC_ALL", "C")],
        &[("LC_ALL", "POSIX")],
        &[("LC_ALL", "xx_YY.UTF-8")],
        &[("PYTHONUTF8", "1")],
        &[("PYTHONUTF8", "0")],
        &[("LC_ALL", "C"), ("PYTHONUTF8", "1")],
        &[("LANG", "C"), ("PYTHONUTF8", "0")],
        &[("LANG", "C"), ("PYTHONCOERCECLOCALE", "0")],
    ] {
        let warm = ran(server.run(["-c", ENCODINGS]).envs(variables.iter().copied()), b"");
        let cold = ran(python(["-c", ENCODINGS]).envs(variables.iter().copied()), b"");
        assert_eq!(
            (warm.out(), told(warm.status)),
            (cold.out(), told(cold.status)),
            "{variables:?}: {}",
            warm.err()
        );
    }
    for variables in [[("LC_ALL", "C"), ("PYTHONUTF8", "0")], [("LC_ALL", ""), ("PYTHONUTF8", "2")]] {
        let warm = ran(server.run(["-c", ENCODINGS]).envs(variables), b"");
        assert!(told(warm.status) == "exit 76" && warm.err().contains("PYTHONUTF8"), "{}", warm.err());
    }
}

#[test]
fn flags_of_variables_are_those_of_python3() {
    let server = Server::start(way(), &[]);
    let show = "import sys; print(sys.flags)";
    for variable in ["PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED"] {
        let warm = ran(server.run(["-c", show]).env(variable, "1"), b"");
        let cold = ran(python(["-c", show]).env_remove("PYTHONDONTWRITEBYTECODE").env(variable, "1"), b"");
        assert_eq!(warm.out(), cold.out(), "{variable}");
    }
    for option in ["-P", "-B"] {
        let warm = ran(&mut server.run([option, "-c", show]), b"");
        let cold = ran(python([option, "-c", show]).env_remove("PYTHONDONTWRITEBYTECODE"), b"");
        assert_eq!(warm.out(), cold.out(), "{option}");
    }
    let next = ran(&mut server.run(["-c", show]), b"");
    assert_eq!(next.out(), ran(python(["-c", show]).env_remove("PYTHONDONTWRITEBYTECODE"), b"").out());
}

#[test]
fn the_users_own_packages_are_the_clients() {
    let homes = tempfile::tempdir().unwrap();
    let version = ran(&mut python(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"]), b"").out();
    let furnish = |name: &str| {
        let home = homes.path().join(name);
        let packages = home.join(format!(".local/lib/python{}/site-packages", version.trim()));
        fs::create_dir_all(packages.join("more")).unwrap();
        fs::write(packages.join("whose.py"), format!("name = {name:?}\n")).unwrap();
        fs::write(packages.join("more.pth"), "more\n").unwrap();
        fs::write(packages.join("more/further.py"), "").unwrap();
        home
    };
    let show = "import sys, site\n\
        try: import whose, further; print(whose.name)\n\
        except ImportError as error: print(error)\n\
        print(sys.path, site.USER_SITE, site.USER_BASE, site.ENABLE_USER_SITE)";
    for servers in ["one", "none"] {
        let server_home = if servers == "one" { furnish("one") } else { homes.path().join("none") };
        let server = Server::start_with(way(), &[], &[("HOME", server_home.to_str().unwrap())]);
        let late = homes.path().join(format!("late-{servers}"));
        for home in [&furnish("one"), &furnish("two"), &homes.path().join("nowhere"), &late, &late] {
            let mut warm = server.run(["-c", show]);
            let warm = ran(warm.env("HOME", home), b"");
            let cold = ran(python(["-c", show]).env_remove("PYTHONDONTWRITEBYTECODE").env("HOME", home), b"");
            assert_eq!(warm.out(), cold.out(), "{servers} {}: {}", home.display(), warm.err());
            // Packages that were not there when the server started.
            furnish(&format!("late-{servers}"));
        }
    }
}

#[test]
fn numerical_libraries_start_no_threads() {
    let modules = tempfile::tempdir().unwrap();
    fs::write(
        modules.path().join("numerical.py"),
        "import os, threading, time\n\
         if os.environ.get('OPENBLAS_NUM_THREADS') != '1' or os.environ.get('OMP_NUM_THREADS') != '1':\n\
         \x20   threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n",
    )
    .unwrap();
    let variables = [("PYTHONPATH", modules.path().to_str().unwrap())];
    let server = Server::start_with(way(), &["--import", "numerical"], &variables);
    // A script has its client's environment.
    let show = "import os, sys; print('numerical' in sys.modules, os.environ.get('OPENBLAS_NUM_THREADS'))";
    assert_eq!(ran(&mut server.run(["-c", show]), b"").out(), "True None\n");
    // Whoever asks for threads is told what they do.
    let directory = tempfile::tempdir().unwrap();
    let mut command = serve_command(way(), &directory.path().join("socket"), &["--import", "numerical"]);
    command.envs(variables).env("OPENBLAS_NUM_THREADS", "4");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("started a thread"), "{said}");
}
