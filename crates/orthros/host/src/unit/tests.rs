//! Whole units, made into what a pair takes.

use std::fs;
use std::path::PathBuf;

use super::*;

/// A unit's file with a directory for more, where a guest has nothing of its own.
struct Written(tempfile::TempDir);

impl Written {
    fn new(text: &str) -> Self {
        let directory = tempfile::Builder::new().tempdir_in("/var/tmp").unwrap();
        fs::write(
            directory.path().join("a@b.service"),
            text.replace("HERE", directory.path().to_str().unwrap()),
        )
        .unwrap();
        Self(directory)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn read(&self) -> Result<UnitService> {
        read_unit(self.at("a@b.service").to_str().unwrap(), Some(Path::new("/data")))
    }
}

fn read(text: &str) -> UnitService {
    Written::new(&format!("[Service]\nExecStart=/bin/sh\n{text}")).read().unwrap()
}

fn variable<'u>(unit: &'u UnitService, name: &str) -> Option<&'u str> {
    let variables = unit.service.exec.environment.as_ref().unwrap();
    variables.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
}

#[test]
fn a_unit_becomes_a_service() {
    let unit = Written::new(
        "[Unit]\nDescription=All of it\nAfter=network.target\n[Service]\nType=notify\nUser=root\nUMask=007\nNice=5\n\
         NoNewPrivileges=yes\nLimitNOFILE=65535\nLimitCORE=1\nLimitCORE=\nRuntimeDirectory=a/%i c\nRuntimeDirectoryMode=2755\n\
         StateDirectory=%p\nExecStartPre=-/bin/sh -c 'exit 1'\nExecStartPre=!/bin/mkdir \\\n  HERE/data\n\
         Environment=\"A=one two\" B=%i\nEnvironment=B=c\nEnvironmentFile=HERE/variables\nEnvironmentFile=-HERE/none\n\
         UnsetEnvironment=LOGNAME B=other\nWorkingDirectory=HERE/data\n\
         ExecStart=@/bin/sh name --file=HERE/file $A ${B} $D\nReadWritePaths=-HERE/data -/none\nPrivateTmp=yes\n",
    );
    fs::create_dir(unit.at("data")).unwrap();
    fs::write(unit.at("file"), "").unwrap();
    fs::write(unit.at("variables"), "D='it is'\nA=x y\n").unwrap();
    let read = unit.read().unwrap();
    let (service, at) = (&read.service, |name: &str| unit.at(name).display().to_string());
    assert_eq!(service.argv, ["/bin/sh", &format!("--file={}", at("file")), "x", "y", "c", "it", "is"]);
    let exec = &service.exec;
    assert_eq!((exec.arg0.as_deref(), exec.umask, exec.nice), (Some("name"), Some(7), Some(5)));
    assert!(exec.no_new_privileges && exec.ignore_sigpipe && service.host_users && !exec.as_root);
    assert_eq!(exec.rlimits, [(libc::RLIMIT_NOFILE, 65535, 65535)]);
    assert_eq!(exec.working_directory, Some(WorkingDirectory { path: at("data"), optional: false }));
    assert_eq!(exec.credentials.as_ref().map(|credentials| (credentials.uid, credentials.gid)), Some((0, 0)));
    let before: Vec<_> =
        exec.pre_commands.iter().map(|it| (it.program.as_str(), it.ignore_failure, it.as_root)).collect();
    assert_eq!(before, [("/bin/sh", true, false), ("/bin/mkdir", false, true)]);
    assert_eq!(exec.pre_commands[1].arguments, [at("data")]);
    let directories: Vec<_> =
        exec.directories.iter().map(|it| (it.path.as_str(), it.mode, it.chown_existing)).collect();
    let data = (at("data"), 0o755, false);
    let expected = [
        ("/run/a/b", 0o2755, true),
        ("/run/c", 0o2755, true),
        ("/var/lib/a", 0o755, true),
        (&data.0, data.1, data.2),
    ];
    assert_eq!(directories, expected);
    assert_eq!(service.copied_paths, ["variables", "file"].map(|name| unit.at(name)));
    assert_eq!(service.programs, ["/bin/sh", "/bin/mkdir"]);
    for (name, value) in [
        ("A", Some("x y")),
        ("B", Some("c")),
        ("D", Some("it is")),
        ("USER", Some("root")),
        ("LOGNAME", None),
        ("RUNTIME_DIRECTORY", Some("/run/a/b:/run/c")),
        ("STATE_DIRECTORY", Some("/var/lib/a")),
        ("PATH", Some(command::SEARCHED)),
        ("NOTIFY_SOCKET", None),
    ] {
        assert_eq!(variable(&read, name), value, "{name}");
    }
    let message = read.report.join("\n");
    for part in [
        "a@b.service is ",
        ": root runs /bin/sh",
        "taken along: ",
        "directories made: /run/a/b",
        "Type=notify: nobody waits",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert!(message.ends_with("not applied: After, PrivateTmp"), "{message}");
}

#[test]
fn what_is_not_said_is_as_systemd_has_it() {
    let unit = read("");
    let exec = &unit.service.exec;
    assert_eq!((exec.umask, exec.nice, &exec.credentials), (Some(0o022), None, &None));
    assert_eq!(exec.rlimits, [(libc::RLIMIT_NOFILE, 1024, 524_288)]);
    assert!(exec.ignore_sigpipe && exec.working_directory.is_none() && variable(&unit, "HOME").is_none());
    assert_eq!(unit.report.len(), 1, "{:?}", unit.report);
    assert!(!read("IgnoreSIGPIPE=no").service.exec.ignore_sigpipe);
    let root = read(
        "ExecStartPre=/bin/sh\nPermissionsStartOnly=yes\nUser=daemon\nWorkingDirectory=-~\nExecSearchPath=/bin:/usr/bin",
    );
    assert!(root.service.exec.pre_commands[0].as_root && root.service.exec.credentials.is_some());
    assert!(root.service.exec.working_directory.as_ref().unwrap().optional);
    assert_eq!(variable(&root, "PATH"), Some("/bin:/usr/bin"));
}

#[test]
fn a_drop_in_takes_back_and_adds() {
    let unit = Written::new("[Service]\nExecStart=/no/such\nUser=nobody-at-all\nDynamicUser=yes\n");
    fs::create_dir(unit.at("a@b.service.d")).unwrap();
    let drop_in = "[Service]\nExecStart=\nExecStart=/bin/sh %j\nUser=\nDynamicUser=no\n";
    fs::write(unit.at("a@b.service.d/own.conf"), drop_in).unwrap();
    let read = unit.read().unwrap();
    assert_eq!(read.service.argv, ["/bin/sh", "a"]);
    assert!(read.report[0].contains("with ") && read.report[0].contains("own.conf"), "{:?}", read.report);
}

#[test]
fn what_cannot_be_is_told_with_its_file_and_line_and_a_way_out() {
    for (line, way) in [
        ("Type=dbus", "message bus"),
        ("Type=odd", "simple, exec, notify, forking or oneshot"),
        ("AmbientCapabilities=CAP_KILL CAP_ODD", "capabilities(7)"),
        ("BusName=org.x", "message bus"),
        ("ExecStart=/bin/sh", "an empty ExecStart="),
        ("ExecStartPre=/no/such", "install"),
        ("User=nobody-at-all", "adduser"),
        ("Group=nobody-at-all", "addgroup"),
        ("SupplementaryGroups=0 nobody-at-all", "addgroup"),
        ("UMask=9", "octal"),
        ("Nice=50", "-20"),
        ("NoNewPrivileges=perhaps", "yes or no"),
        ("LimitNOFILE=many", "65536"),
        ("RuntimeDirectory=/run/x", "without /run"),
        ("StateDirectory=../x", "without /var/lib"),
        ("StateDirectory=x:y", "colon"),
        ("LogsDirectoryMode=rwx", "octal"),
        ("Environment=A", "NAME=VALUE"),
        ("EnvironmentFile=/no/such", "write - before"),
        ("EnvironmentFile=/etc/*", "absolute path of one"),
        ("EnvironmentFile=/dev/zero", "no regular file"),
        ("EnvironmentFile=/etc", "no regular file"),
        ("WorkingDirectory=data", "absolute path"),
        ("ExecReload=%", ""),
        ("BindPaths=/a", "--file"),
        ("Environment='A=b", "not closed"),
        ("Environment=A=%b", "in the guests"),
    ] {
        let unit = Written::new(&format!("[Service]\nExecStart=/bin/sh\n{line}\n"));
        let path = fs::canonicalize(unit.at("a@b.service")).unwrap();
        match unit.read() {
            Ok(_) => assert_eq!(way, "", "{line} is accepted"),
            Err(error) => {
                let message = error.to_string();
                assert!(
                    message.starts_with(&format!("{}:3: {line}: ", path.display())) && message.contains(way),
                    "{message}"
                );
            }
        }
    }
    let message = Written::new("[Service]\nUser=root\n").read().unwrap_err().to_string();
    assert!(message.contains("a@b.service: it has no ExecStart="), "{message}");
}

/// A unit is of a package that nobody has read: its files are not waited for, nor read without end.
#[test]
fn files_that_never_end_are_refused() {
    for name in ["variables", "a@b.service.d/own.conf"] {
        let unit = Written::new("[Service]\nExecStart=/bin/sh\nEnvironmentFile=HERE/variables\n");
        fs::create_dir(unit.at("a@b.service.d")).unwrap();
        fs::write(unit.at("variables"), "").unwrap();
        unit.read().unwrap();
        let _ = fs::remove_file(unit.at(name));
        rustix::fs::mknodat(rustix::fs::CWD, unit.at(name), rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
        let error = unit.read().unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
        fs::remove_file(unit.at(name)).unwrap();
        fs::write(unit.at(name), "#\n".repeat(600 << 10)).unwrap();
        let error = unit.read().unwrap_err().to_string();
        assert!(error.contains("more than 1 MiB"), "{error}");
    }
}

#[test]
fn a_service_that_goes_into_the_background_is_what_is_left() {
    let left = |unit: &UnitService| unit.service.exec.main_process.clone();
    assert_eq!(left(&read("PIDFile=/run/x.pid")), MainProcess::Executed);
    let forking = |pid_file: Option<&str>| MainProcess::Left { pid_file: pid_file.map(str::to_owned) };
    assert_eq!(left(&read("Type=forking")), forking(None));
    assert_eq!(left(&read("Type=forking\nPIDFile=/run/x/%p.pid")), forking(Some("/run/x/a.pid")));
    assert_eq!(left(&read("Type=forking\nPIDFile=x.pid")), forking(Some("/run/x.pid")));

    // What stands before the last command is run to its end, and what it starts stays.
    let unit = read("ExecStart=-/bin/sleep 1\nExecStart=/bin/true a\nType=oneshot\nRemainAfterExit=yes");
    let commands: Vec<_> =
        unit.service.exec.start_commands.iter().map(|it| (it.program.as_str(), it.ignore_failure)).collect();
    assert_eq!(commands, [("/bin/sh", false), ("/bin/sleep", true)]);
    assert_eq!((left(&unit), unit.service.argv.join(" ")), (forking(None), "/bin/true a".to_owned()));
    for program in ["/bin/sh", "/bin/sleep"] {
        assert!(unit.service.programs.iter().any(|other| other == program), "{program}");
    }
}

#[test]
fn capabilities_are_added_and_taken_away() {
    let ambient = |text: &str| read(text).service.exec.ambient_capabilities;
    assert_eq!(ambient(""), 0);
    assert_eq!(
        ambient("AmbientCapabilities=CAP_CHOWN cap_kill\nAmbientCapabilities=CAP_BPF"),
        1 | 1 << 5 | 1 << 39
    );
    assert_eq!(ambient("AmbientCapabilities=CAP_CHOWN CAP_KILL\nAmbientCapabilities=~CAP_KILL"), 1);
    assert_eq!(ambient("AmbientCapabilities=~CAP_KILL"), (1 << 41) - 1 - (1 << 5));
    assert_eq!(ambient("AmbientCapabilities=CAP_KILL\nAmbientCapabilities="), 0);
}

/// The distribution's own, where it is installed.
#[test]
fn debians_redis_can_be_had() {
    if !Path::new("/lib/systemd/system/redis-server.service").is_file() {
        orrery_testing::skipped!("redis-server's unit is not installed");
        return;
    }
    let unit = read_unit("redis-server", Some(Path::new("/var/lib/redis"))).unwrap();
    assert_eq!(unit.service.argv[..2], ["/usr/bin/redis-server", "/etc/redis/redis.conf"]);
    let exec = &unit.service.exec;
    assert!(unit.service.copied_paths.iter().any(|path| path == Path::new("/etc/redis/redis.conf")));
    for path in ["/run/redis", "/var/lib/redis", "/var/log/redis"] {
        assert!(exec.directories.iter().any(|directory| directory.path == path), "{path}");
    }
    let redis = Users::read().unwrap().user("redis").unwrap().uid;
    assert_eq!(exec.credentials.as_ref().unwrap().uid, redis);
}
