//! Where a program's surroundings show: a warm run must not differ from `python3`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on has failed")]

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{Server, compare, python, ran, ways};

/// One comparison: what is written into `script.py`, how it is called.
struct Case<'a> {
    name: &'a str,
    script: &'a [u8],
    words: &'a [&'a str],
    input: &'a [u8],
    environment: &'a [(&'a str, &'a str)],
}

const SCRIPT: &[&str] = &["script.py"];

const fn case<'a>(name: &'a str, script: &'a [u8]) -> Case<'a> {
    Case { name, script, words: SCRIPT, input: b"", environment: &[] }
}

const SURROUNDINGS: &[u8] = br"
import sys, os
print(sys.argv, sys.orig_argv, sys.path, __file__, __name__, __doc__, __package__, __spec__, __cached__, __loader__.path)
print(list(globals()), __builtins__, __annotations__, type(__loader__), sys.flags.safe_path, sys.executable, sys.prefix)
print(sys.modules['__main__'].__dict__ is globals(), sys.path_importer_cache.get(__file__, 'absent'), sys.warnoptions)
print(os.getcwd(), sorted(n for n in os.listdir('/proc/self/fd') if int(n) < 100), open('/dev/null').fileno(), oct(os.umask(0)))
for stream in sys.stdin, sys.stdout, sys.stderr:
    print(stream, stream.errors, stream.line_buffering, stream.write_through, stream.newlines, stream.buffer, stream.fileno(), stream.isatty())
print(sys._getframe().f_back, sys.getrecursionlimit(), sys.getfilesystemencoding(), sys.getdefaultencoding())
print({name: os.environ[name] for name in os.environ if name != 'ORRERY_WARM'})
";

const ENDINGS: &[&[u8]] = &[
    b"import sys; sys.exit()",
    b"import sys; sys.exit(None)",
    b"import sys; sys.exit(0)",
    b"import sys; sys.exit(3)",
    b"import sys; sys.exit(True)",
    b"import sys; sys.exit(-1)",
    b"import sys; sys.exit(256 + 5)",
    b"import sys; sys.exit(1 << 70)",
    b"import sys; sys.exit('a message')",
    b"import sys; sys.exit((1, 'two'))",
    b"import sys; print('out', end=''); sys.exit('no newline before')",
    b"raise SystemExit",
    b"raise SystemExit(4) from ValueError('cause')",
    b"class Odd(SystemExit): code = 6\nraise Odd(7)",
    b"raise KeyboardInterrupt",
    b"raise Exception('plain')",
    b"raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    b"def f():\n    try:\n        1 / 0\n    finally:\n        f.missing\nf()",
    b"import json\njson.loads('{broken')",
    b"def deep(n): return deep(n - 1) if n else [][0]\ndeep(20)",
    b"print('before')\nthis is no python\n",
    b"if True:\nprint('indent')\n",
    b"x = '''never closed\n",
    b"\xff\xfe not UTF-8\n",
    b"# coding: latin-1\nprint(ascii('\xe9'))\n",
    b"# coding: nonsense\n",
    b"\xef\xbb\xbfprint('byte order mark')\n",
    b"print('null \x00 byte')\n",
    b"",
    b"# only a comment",
    b"import sys\nsys.excepthook = lambda *a: print('hooked', a[0])\n1 / 0\n",
    b"import sys\ndef hook(*a): raise SystemExit(9)\nsys.excepthook = hook\n1 / 0\n",
    b"import sys\ndef hook(*a): raise ValueError('hook')\nsys.excepthook = hook\n1 / 0\n",
    b"import sys\ndel sys.excepthook\n1 / 0\n",
    b"import sys\nsys.stderr = None\n1 / 0\n",
    b"import sys\nsys.stderr = None\nsys.exit('unseen')\n",
    b"import sys\nsys.stdout = None\nprint('unseen')\n",
    b"import sys\nsys.stdout.close()\n",
    b"import sys\nsys.stderr.close()\n1 / 0\n",
    b"import os\nos.close(1)\nprint('lost')\n",
    b"import os\nos.close(2)\nprint('fine')\n1 / 0\n",
    b"import warnings\nwarnings.warn('careful')\n",
    b"import os; print('unflushed'); os._exit(3)",
    b"import os; print('parent'); os.fork() and os.wait()",
    b"import os, sys\npid = os.fork()\nif pid: print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\nsys.exit(3 if pid else 4)",
    b"import os, sys\npid = os.fork()\nif pid: print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\nelse: raise KeyboardInterrupt",
    b"import os, sys, atexit\natexit.register(print, 'handler')\nif not os.fork(): sys.exit('child')\nos.wait()\nsys.exit(5)",
];

const LAST_ACTS: &[&[u8]] = &[
    b"import atexit; atexit.register(print, 'handler'); print('body')",
    b"import atexit\natexit.register(lambda: 1 / 0)\natexit.register(print, 'still')\n",
    b"import atexit, sys\n@atexit.register\ndef f(): print('finalizing', sys.is_finalizing())\nsys.exit(2)",
    b"class A:\n  def __del__(self): print('gone', __name__)\na = A()\n",
    b"class A:\n  def __del__(self): print('gone', __name__)\na = A(); a.self = a\n",
    b"import sys\nclass A:\n  def __del__(self): print(sys.is_finalizing(), sys.meta_path, sys.path)\na = A()\n",
    b"class A:\n  def __init__(self, n): self.n = n\n  def __del__(self): print('gone', self.n)\nb, a, _c = A(1), A(2), A(3)\ndef f(): return b\n",
    b"class A:\n  def __del__(self): raise ValueError('in del')\na = A()\n",
    b"import sys\nclass A:\n  def __del__(self): print('exit')\nsys.exitfunc = A()\nsys.modules['extra'] = A()\n",
    b"import json\nclass A:\n  def __del__(self): print('gone')\ndef f(a=A()): pass\nimport types\nm = types.ModuleType('made'); m.a = A()\nimport sys; sys.modules['made'] = m\n",
    b"f = open('scratch', 'w'); f.write('flushed at the end')\n",
    b"import gc; gc.disable()\nclass A:\n  def __del__(self): print('gone')\na = A(); a.self = a; del a\n",
    b"import json\njson.kept = open('scratch', 'w'); json.kept.write('flushed at the end, kept elsewhere')\n",
    b"import gzip, json\njson.kept = gzip.open('scratch', 'wt'); json.kept.write('compressed')\n",
    b"import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\nprint('main')\n",
    b"import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('never')), daemon=True).start()\nprint('main')\n",
    b"import threading\ndef f(): 1 / 0\nthreading.Thread(target=f, name='T').start()\n",
    b"import threading\ndef f(): raise SystemExit(3)\nthreading.Thread(target=f).start()\n",
    b"import ctypes; ctypes.CDLL(None).printf(b'from C\\n'); print('from Python')\n",
    b"import weakref\nclass A: pass\na = A(); weakref.finalize(a, print, 'finalized')\n",
    b"import logging; logging.basicConfig(); logging.warning('logged'); logging.info('not')\n",
    b"import tempfile, os; d = tempfile.TemporaryDirectory(); print(os.path.isdir(d.name))\n",
    b"async def f(): return 1\nf()\n",
    b"def g():\n  try: yield\n  finally: print('generator closed')\ni = g(); next(i)\n",
];

fn scripted() -> Vec<Case<'static>> {
    let mut cases = vec![
        case("surroundings", SURROUNDINGS),
        Case { words: &["./deep/../script.py", "a", "", "b c", "-x", "--help", "\u{e9}"], ..case("words", SURROUNDINGS) },
        Case { words: &["link.py"], ..case("symbolic link", SURROUNDINGS) },
        Case { words: &["-c", "import sys; print(sys.argv, sys.orig_argv, sys.path, list(globals()), __name__); 1/0", "a"], ..case("-c", b"") },
        Case { words: &["-c", "print('\u{e9}\u{1f6a2}')\nif 1:\n  print(2)"], ..case("-c lines", b"") },
        Case { words: &["-c", "this is no python"], ..case("-c syntax", b"") },
        Case { words: &["-c", "raise KeyboardInterrupt"], ..case("-c interrupt", b"") },
        Case { words: &["-m", "module", "x"], ..case("-m", b"") },
        Case { words: &["-m", "package"], ..case("-m package", b"") },
        Case { words: &["-m", "missing"], ..case("-m missing", b"") },
        Case { words: &["-m", "module", "raise"], ..case("-m exception", b"") },
        Case { words: &["-m", "module", "interrupt"], ..case("-m interrupt", b"") },
        Case { words: &["package"], ..case("directory", b"") },
        Case { words: &["deep"], ..case("directory without main", b"") },
        Case { words: &["archive.zip", "1"], ..case("archive", b"") },
        Case { words: &["compiled.pyc", "1"], ..case("compiled", b"") },
        Case { words: &["broken.pyc"], ..case("compiled by another", b"") },
        Case { words: &[], input: b"import sys; print(sys.argv, sys.path[0], __file__, sys.stdin.read())", ..case("program on stdin", b"") },
        Case { words: &["-", "a", "b"], input: b"import sys\nprint(sys.argv, sys.orig_argv)\n1/0", ..case("dash", b"") },
        Case { words: &["missing.py"], ..case("missing", b"") },
        Case { words: &["it's \"miss\\ing\".py"], ..case("missing with quotes", b"") },
        Case { words: &["/nonexistent/directory/script.py"], ..case("missing directory", b"") },
        Case { words: &["script.py/x"], ..case("no directory", b"") },
        Case { input: "line 1\nz\u{e4}hle\nlast".as_bytes(), ..case("stdin", b"import sys\nprint(repr(input())); print(sys.stdin.readlines())") },
        Case { input: b"\xff\xfe\n", ..case("stdin not UTF-8", b"import sys\nprint(ascii(sys.stdin.read()))") },
        case("surrogates to stdout", b"print('\\udcff')"),
        case("lone surrogate to stdout", b"print('\\ud800')"),
        case("import a neighbour", b"import neighbour; print(neighbour.__file__, neighbour.x); neighbour.fail()"),
        case("interrupted sleep", b"import os, signal, threading, time\nthreading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()\ntime.sleep(10)"),
        case("broken pipe", b"import os\nr, w = os.pipe(); os.close(r)\ntry: os.write(w, b'x')\nexcept BrokenPipeError as e: print(e)"),
        case("handled signal", b"import os, signal\nsignal.signal(signal.SIGTERM, lambda *a: print('term', a[0]))\nos.kill(os.getpid(), signal.SIGTERM)\nsignal.raise_signal(signal.SIGTERM)"),
        case("own module is main", b"import __main__\n__main__.x = 5\nprint(x)\nclass A:\n  def __del__(self): print(x)\na = A()"),
        case("multiprocessing", b"import multiprocessing as m\ndef f(x): return x * x\nif __name__ == '__main__':\n  with m.get_context('fork').Pool(2) as p: print(p.map(f, range(5)))\n  with m.get_context('spawn').Pool(1) as p: print(p.map(f, range(5)))"),
        case("exec", b"import os; print('gone', flush=True); os.execv('/bin/echo', ['echo', 'another program'])"),
        case("pickle of main", b"import pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A())).__class__ is A)"),
        case("dataclass and typing", b"import dataclasses, typing\n@dataclasses.dataclass\nclass P:\n  x: int = 1\nprint(typing.get_type_hints(P), P(), __annotations__)\ny: int = 3\nprint(__annotations__)"),
        case("inspect source", b"import inspect\ndef f():\n    return 1\nprint(inspect.getsource(f)); print(inspect.getsourcefile(f))"),
        case("traceback module", b"import traceback\ntry: 1/0\nexcept ZeroDivisionError: traceback.print_exc()"),
    ];
    for environment in [
        &[("LANG", "C")][..],
        &[("LANG", "C"), ("PYTHONCOERCECLOCALE", "1")],
        &[("LANG", "C"), ("PYTHONCOERCECLOCALE", "0")],
        &[("LC_ALL", "C")],
        &[("LC_ALL", "POSIX")],
        &[("LANG", "")],
        &[("LANG", "xx_YY.UTF-8")],
        &[("LC_ALL", "xx_YY.UTF-8")],
        &[("LANG", "C.utf8")],
        &[("PYTHONUTF8", "1")],
        &[("LANG", "en_US.UTF-8"), ("LC_CTYPE", "C")],
        &[("PYTHONPATH", "/nonexistent:deep::/usr/lib/python3.11")],
        &[("PYTHONPATH", "")],
        &[("PYTHONSAFEPATH", "1")],
        &[("PYTHONUNBUFFERED", "1")],
        &[("PYTHONUNBUFFERED", "0")],
        &[("PYTHONIOENCODING", "latin-1")],
        &[("PYTHONIOENCODING", ":replace")],
        &[("PYTHONIOENCODING", "ascii:backslashreplace")],
        &[("PYTHONWARNINGS", "error,default::UserWarning")],
        &[("PYTHONDONTWRITEBYTECODE", "0")],
        &[("TZ", "Asia/Tokyo")],
        &[("EMPTY", ""), ("ODD NAME", "x=y=z")],
    ] {
        let script = br"
import os, sys, time, warnings
print(sys.stdin.errors, sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors, sys.stdout.line_buffering, sys.stdout.write_through)
print(sys.path, sys.warnoptions, sys.dont_write_bytecode, time.tzname, time.localtime(0).tm_hour)
print(ascii({k: v for k, v in os.environ.items() if k != 'ORRERY_WARM'}), type(sys.stdout.buffer).__name__)
warnings.warn('user')
warnings.warn('bytes', BytesWarning)
";
        cases.push(Case { environment, ..case("environment", script) });
    }
    let numbered = [("ending", ENDINGS), ("last act", LAST_ACTS)];
    cases.extend(numbered.iter().flat_map(|(name, scripts)| scripts.iter().map(|script| case(name, script))));
    cases
}

/// Files beside the script.
fn furnish(directory: &Path) {
    let write = |name: &str, text: &str| fs::write(directory.join(name), text).unwrap();
    fs::create_dir_all(directory.join("deep")).unwrap();
    fs::create_dir_all(directory.join("package")).unwrap();
    write("package/__init__.py", "print('init', __name__)\n");
    write(
        "package/__main__.py",
        "import sys; print(sys.argv, sys.path[0], __name__, __package__, __file__)\n",
    );
    write("neighbour.py", "x = 1\ndef fail():\n    raise LookupError('next door')\n");
    write(
        "module.py",
        "import sys\nprint(sys.argv, sys.orig_argv, sys.path[0], __name__, __file__, __spec__.name)\n\
         if 'raise' in sys.argv: 1 / 0\nif 'interrupt' in sys.argv: raise KeyboardInterrupt\n",
    );
    write("broken.pyc", "this is not compiled");
    symlink("script.py", directory.join("link.py")).unwrap();
    let make = "import zipfile, py_compile\nwith zipfile.ZipFile('archive.zip', 'w') as z: \
                z.writestr('__main__.py', 'import sys; print(sys.argv, sys.path[0], __file__); 1/int(sys.argv[1]) - x')\n\
                py_compile.compile('module.py', 'compiled.pyc')\n";
    assert!(python(["-c", make]).current_dir(directory).status().unwrap().success());
}

#[test]
fn surroundings_endings_and_last_acts_are_those_of_python3() {
    for way in ways() {
        let server = Server::start(way, &["--import", common::IMPORTS, "--timeout", "30s", "--workers", "2"]);
        let scratch = tempfile::tempdir().unwrap();
        furnish(scratch.path());
        let mut complaints = String::new();
        for Case { name, script, words, input, environment } in scripted() {
            fs::write(scratch.path().join("script.py"), script).unwrap();
            let run = |command: &mut Command| {
                let file = scratch.path().join("scratch");
                let _ = fs::remove_file(&file);
                // Both see the same variables, in the same order.
                command.env("PYTHONDONTWRITEBYTECODE", "1").env("ORRERY_WARM", server.socket());
                let ran = ran(command.envs(environment.iter().copied()).current_dir(&scratch), input);
                (ran, fs::read(file).unwrap_or_default())
            };
            let (warm, warm_file) = run(&mut server.run(words));
            let (cold, cold_file) = run(&mut python(words));
            let what =
                format!("{way:?} {name} {words:?} {environment:?} {}", String::from_utf8_lossy(script));
            compare(&mut complaints, &what, &warm, &cold);
            // Compressed files carry the time of their making.
            if warm_file.len() != cold_file.len()
                || !script.starts_with(b"import gzip") && warm_file != cold_file
            {
                complaints.push_str(&format!("{what}: the file differs: {warm_file:?}, not {cold_file:?}\n"));
            }
        }
        assert!(complaints.is_empty(), "{complaints}");
    }
}

#[test]
fn options_of_the_interpreter_are_honoured() {
    for way in ways() {
        let server = Server::start(way, &["--import", common::IMPORTS, "--timeout", "30s"]);
        let script = "import sys, warnings; print(sys.stdout.write_through, sys.dont_write_bytecode, sys.path[0], \
                      sys.warnoptions); warnings.warn('w')";
        let mut complaints = String::new();
        for options in [
            &["-u"][..],
            &["-B"],
            &["-P"],
            &["-W", "error"],
            &["-Wignore", "-uB"],
            &["-uBWerror"],
            &["-W", "error", "-W", "ignore"],
        ] {
            let words: Vec<&str> = options.iter().copied().chain(["-c", script]).collect();
            let warm = ran(&mut server.run(&words), b"");
            let cold = ran(python(&words).env_remove("PYTHONDONTWRITEBYTECODE"), b"");
            compare(&mut complaints, &format!("{way:?} {options:?}"), &warm, &cold);
        }
        assert!(complaints.is_empty(), "{complaints}");
    }
}

#[test]
fn a_closed_output_is_noticed_as_python3_notices_it() {
    for way in ways() {
        let server = Server::start(way, &["--timeout", "30s"]);
        for script in ["print('x' * 100)", "import sys; sys.stdout.write('y' * 1000000)", "print('x'); 1/0"] {
            let run = |command: &mut Command| {
                let (reader, writer) = std::io::pipe().unwrap();
                drop(reader);
                let output =
                    command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped()).output().unwrap();
                (common::told(output.status), String::from_utf8(output.stderr).unwrap())
            };
            assert_eq!(
                run(&mut server.run(["-c", script])),
                run(&mut python(["-c", script])),
                "{way:?} {script}"
            );
        }
    }
}

#[test]
fn streams_that_are_closed_are_none_and_the_terminal_is_a_terminal() {
    for way in ways() {
        let server = Server::start(way, &["--timeout", "30s"]);
        let script = "import os, sys; os.write(3, repr([sys.stdin, sys.stdout, sys.stderr, \
                      [os.path.exists(f'/proc/self/fd/{n}') for n in range(3)]]).encode())";
        // The shell gives both the same closed descriptors, and a file as number 3.
        for closed in ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"] {
            let script = script.replace("os.write(3,", "os.write(os.open('out', os.O_WRONLY | os.O_CREAT), ");
            let scratch = tempfile::tempdir().unwrap();
            let run = |command: &str| {
                let mut shell = Command::new("/bin/sh");
                common::settle_environment(&mut shell)
                    .env("ORRERY_WARM", server.socket())
                    .current_dir(&scratch);
                shell.args(["-c", &format!("exec {command} -c \"$SCRIPT\" {closed}")]).env("SCRIPT", &script);
                shell.env("PYTHONDONTWRITEBYTECODE", "1");
                let status = common::told(shell.status().unwrap());
                let text = fs::read_to_string(scratch.path().join("out")).unwrap_or_default();
                let _ = fs::remove_file(scratch.path().join("out"));
                (status, text)
            };
            let warm = run(&format!("{} warm run", orrery_testing::built("orrery").display()));
            assert_eq!(warm, run(common::PYTHON), "{way:?} {closed}");
        }
        let script = "import sys; print([(s.isatty(), s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)]); print(input('? '))";
        let run = |command: &str| {
            let mut terminal = Command::new("/usr/bin/script");
            common::settle_environment(&mut terminal)
                .env("ORRERY_WARM", server.socket())
                .env("SCRIPT", script);
            terminal.args(["-qec", &format!("{command} -c \"$SCRIPT\""), "/dev/null"]);
            let text = ran(&mut terminal, b"typed\n").out();
            // When the terminal echoes what was typed is a matter of chance.
            let mut words: Vec<_> = text.split_whitespace().map(str::to_owned).collect();
            words.sort();
            words
        };
        let warm = run(&format!("{} warm run", orrery_testing::built("orrery").display()));
        assert_eq!(warm, run(common::PYTHON), "{way:?}");
        let yes = warm.iter().filter(|word| word.contains("True")).count();
        assert_eq!(yes, 6, "{warm:?}");
    }
}

#[test]
fn what_the_client_ignores_the_script_ignores() {
    for way in ways() {
        let server = Server::start(way, &["--timeout", "30s"]);
        let script = "import signal; print([signal.getsignal(s) for s in (1, 2, 3, 15, signal.SIGTSTP)])";
        let run = |command: &str| {
            let mut shell = Command::new("/bin/sh");
            common::settle_environment(&mut shell).env("ORRERY_WARM", server.socket()).env("SCRIPT", script);
            shell.args(["-c", &format!("trap '' HUP INT TSTP; exec {command} -c \"$SCRIPT\"")]);
            ran(&mut shell, b"").out()
        };
        assert_eq!(
            run(&format!("{} warm run", orrery_testing::built("orrery").display())),
            run(common::PYTHON),
            "{way:?}"
        );
    }
}

#[test]
fn random_numbers_differ_from_request_to_request() {
    for way in ways() {
        // A module that has drawn from every generator before the first request.
        let scratch = tempfile::tempdir().unwrap();
        let drawn = "import random, ssl, uuid, tempfile\nssl.RAND_bytes(8), random.random(), uuid.uuid4(), tempfile.mktemp()\n";
        fs::write(scratch.path().join("drawn.py"), drawn).unwrap();
        let path = [("PYTHONPATH", scratch.path().to_str().unwrap())];
        let server = Server::start_with(way, &["--import", "drawn", "--timeout", "30s"], &path);
        let script = "import random, ssl, secrets, uuid, tempfile, os; ssl.RAND_bytes(1); print(random.random(), \
                      ssl.RAND_bytes(8).hex(), secrets.token_hex(8), uuid.uuid4(), os.path.basename(tempfile.mktemp()))";
        let all: Vec<String> = (0..5)
            .flat_map(|_| {
                let words = ran(&mut server.run(["-c", script]), b"").out();
                words.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
            })
            .collect();
        assert_eq!(all.len(), 25, "{all:?}");
        let different: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len(), "{way:?} {all:?}");
    }
}
