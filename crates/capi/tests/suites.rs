//! Known libraries, built by `orrery-cc` from the sources of Debian's packages: their own tests pass in instances.
//!
//! With `ORRERY_WHOLE` (`make soak`): the sources are fetched, and OpenSSL's take minutes to build.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// A library, and its tests.
struct Known {
    /// Debian's source package.
    package: &'static str,
    /// What a shell does in the directory of the sources before the tests are built, with the driver as `$CC`.
    prepare: &'static str,
    /// The programs of its tests, each with a `main` that becomes `suite_main`.
    suites: &'static [Suite],
}

struct Suite {
    name: &'static str,
    arguments: &'static [&'static str],
    /// What the driver is given besides: sources, options, static libraries.
    build: &'static str,
    /// In how many instances it runs, one after the other.
    counts: &'static [u32],
    /// Whether all instances are there until the last one has run. Where one takes too much memory for that, it is destroyed before.
    is_kept: bool,
}

const ZLIB: &str = "-DHAVE_UNISTD_H -D_LARGEFILE64_SOURCE=1 -I. adler32.c crc32.c deflate.c infback.c inffast.c inflate.c inftrees.c trees.c \
                    zutil.c compress.c uncompr.c gzclose.c gzlib.c gzread.c gzwrite.c";
const MIMALLOC: &str = "-Iinclude src/static.c";
const OPENSSL: &str =
    "-I. -Iinclude -Iapps/include -Itest test/testutil/*.c apps/lib/opt.c libssl.a libcrypto.a";
const ALL: &[u32] = &[1, 2, 1000];

/// A test without arguments that runs in 1, 2 and 1,000 instances, which are kept.
const fn test(name: &'static str, build: &'static str) -> Suite {
    Suite { name, arguments: &[], build, counts: ALL, is_kept: true }
}

const KNOWN: &[Known] = &[
    Known { package: "zlib", prepare: ":", suites: &[test("example", ZLIB), test("infcover", ZLIB)] },
    Known {
        package: "expat",
        prepare: "cd expat && cmake -S . -B b -DEXPAT_SHARED_LIBS=OFF -DEXPAT_BUILD_TESTS=OFF -DEXPAT_BUILD_TOOLS=OFF \
                  -DEXPAT_BUILD_EXAMPLES=OFF -DEXPAT_BUILD_DOCS=OFF && cmake --build b",
        suites: &[test(
            "runtests",
            "-DXML_TESTING -DHAVE_EXPAT_CONFIG_H -Iexpat/b -Iexpat/lib expat/tests/chardata.c expat/tests/structdata.c \
             expat/tests/minicheck.c expat/tests/memcheck.c expat/lib/xmlparse.c expat/lib/xmlrole.c expat/lib/xmltok.c",
        )],
    },
    Known {
        package: "libxml2",
        prepare: "CFLAGS='-O2 -fPIC' ./configure --disable-shared --enable-static --without-python --without-lzma --without-zlib \
                  --without-icu && make -j2 libxml2.la",
        // A run leaves some 30 MiB allocated.
        suites: &[Suite { is_kept: false, ..test("testapi", "-I. -Iinclude .libs/libxml2.a -lm -lpthread") }],
    },
    Known {
        package: "mimalloc",
        prepare: ":",
        suites: &[
            // A run takes four seconds, and its instance keeps 111 MiB, as the process does of the plain library.
            Suite { counts: &[1, 2, 200], is_kept: false, ..test("test-api", MIMALLOC) },
            // It has 32 threads, which take half a minute.
            Suite { counts: &[1, 2], ..test("test-stress", MIMALLOC) },
            // The same with a tenth of the load, and five rounds in place of fifty.
            Suite { arguments: &["32", "1", "5"], is_kept: false, ..test("test-stress", MIMALLOC) },
        ],
    },
    Known {
        package: "openssl",
        // Assembly names a variable of the library (OPENSSL_ia32cap_P), which the pass refuses to move.
        prepare: "./Configure linux-x86_64-clang no-shared no-asm no-module no-dso && make -j2 build_generated libcrypto.a libssl.a",
        suites: &[
            test("sha_test", OPENSSL),
            test("hmactest", OPENSSL),
            test("aesgcmtest", OPENSSL),
            test("asn1_encode_test", OPENSSL),
            test("pkcs7_test", OPENSSL),
            test("rand_test", OPENSSL),
            test("stack_test", OPENSSL),
            test("x509_time_test", OPENSSL),
            test("evp_kdf_test", OPENSSL),
            test("property_test", OPENSSL),
            test("rsa_test", OPENSSL),
            test("dhtest", OPENSSL),
            test("sm4_internal_test", OPENSSL),
        ],
    },
];

#[test]
fn zlibs_tests_pass_in_instances() {
    pass_in_instances("zlib");
}

#[test]
fn expats_tests_pass_in_instances() {
    pass_in_instances("expat");
}

#[test]
fn libxml2s_tests_pass_in_instances() {
    pass_in_instances("libxml2");
}

#[test]
fn mimallocs_tests_pass_in_instances() {
    pass_in_instances("mimalloc");
}

#[test]
fn libcryptos_tests_pass_in_instances() {
    pass_in_instances("openssl");
}

/// Builds the tests of a library and runs each in instances.
fn pass_in_instances(package: &str) {
    if std::env::var_os("ORRERY_WHOLE").is_none() {
        orrery_testing::skipped!("the sources of known libraries are not fetched without ORRERY_WHOLE=1");
        return;
    }
    let Some(pass) = orrery_testing::cls::pass() else { return };
    if ["apt-get", "cmake", "perl"].iter().any(|tool| !orrery_testing::is_there(tool)) {
        return;
    }
    let sources = orrery_testing::target_directory().join("libraries");
    let script = orrery_testing::root().join("scripts/debian-source");
    run(Command::new(script).arg(&sources).arg(package));
    let directory = tempfile::tempdir().unwrap();
    let runner = runner(directory.path());
    let mut failed = Vec::new();
    for known in KNOWN.iter().filter(|known| known.package == package) {
        let source = sources.join(known.package);
        shell(&pass, &source, known.prepare);
        for suite in known.suites {
            let library = directory.path().join(format!("{}.so", suite.name));
            let main = format!(
                "main=$(find . -name {}.c | head -n 1) && $CC -O2 -w -fPIC -shared -Wl,-z,defs -Dmain=suite_main $main {} -o {} -lpthread",
                suite.name,
                suite.build,
                library.display()
            );
            shell(&pass, &source, &main);
            for count in suite.counts {
                let mut command = Command::new("timeout");
                command.arg("7200").arg(&runner).arg(&library).arg(count.to_string());
                command.arg(if suite.is_kept { "kept" } else { "destroyed" }).args(suite.arguments);
                command.current_dir(&source);
                let output = command.output().unwrap();
                let errors = String::from_utf8_lossy(&output.stderr);
                let end = errors.lines().last().unwrap_or_default();
                let run = [&[suite.name], suite.arguments].concat().join(" ");
                println!("{} {run} in {count}: {}, {end}", known.package, output.status);
                if !output.status.success() || !errors.contains(&format!("{count} instances, 0 failed")) {
                    failed.push(format!("{} {run} in {count}: {}\n{errors}", known.package, output.status));
                }
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Builds the program that runs a test in instances.
fn runner(directory: &Path) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
    let libraries = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let program = directory.join("suite");
    let mut command = Command::new("cc");
    command.args(["-Wall", "-Wextra", "-Werror", "-O1", "-g", "-I"]).arg(sources.join("../../include"));
    command.arg(sources.join("tests/instance/suite.c")).arg(format!("-Wl,-rpath,{}", libraries.display()));
    run(command.arg("-L").arg(&libraries).args(["-lorrery", "-o"]).arg(&program));
    program
}

/// Has a shell do something in the directory of a library, with the driver as its compiler.
fn shell(pass: &Path, directory: &Path, script: &str) {
    let mut command = Command::new("sh");
    command.args(["-euc", script]).current_dir(directory).env("CC", pass.join("bin/orrery-cc"));
    run(command.env("ORRERY_CLS_LIB", pass.join("lib")).env_remove("MAKEFLAGS").env_remove("MAKELEVEL"));
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    let text = [&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat();
    let end: String = text.chars().rev().take(4000).collect::<Vec<_>>().into_iter().rev().collect();
    assert!(output.status.success(), "{command:?}: {}\n{end}", output.status);
}
