//! Services that go into the background, as their units have them. SKIPPED where QEMU, criu, a kernel, root or the program are absent.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "orthros/pairs.rs"]
mod pairs;

use std::io::BufReader;
use std::path::Path;
use std::time::Duration;

use pairs::{ONE_PAIR, Up, connect, get, missing, orthros};

const PAGES: &str = "/var/www/html";

/// Returns why a unit of Debian's cannot be run here, if it cannot.
fn unit_is_missing(unit: &str, programs: &[(&str, &'static str)]) -> Option<String> {
    if let Some(why) = missing(programs) {
        return Some(why);
    }
    let there = Path::new("/lib/systemd/system").join(unit).is_file();
    (!there).then(|| format!("{unit} is not installed"))
}

/// Starts a pair for a unit of Debian's as it is, with these files and programs of this host.
fn up(unit: &str, files: &[&str], options: &[&str]) -> Up {
    let mut command = orthros();
    command.args(["up", "--json", "--unit", unit]).args(options);
    for file in files {
        command.args(["--file", file]);
    }
    let mut up = Up::begin(command);
    up.expect("help");
    up
}

/// Has a web server's unit answer each request over one connection, through a panic and a hang.
fn serves_through_panic_and_hang(unit: &str, name: &str, files: &[&str], memory: &str) {
    let _one = ONE_PAIR.lock();
    let network = format!("orrery-{unit}-{}", std::process::id());
    let mut up = up(unit, files, &["--network", &network, "--memory", memory]);
    let connection = connect(&network, 80);
    connection.set_read_timeout(Some(Duration::from_secs(180))).unwrap();
    let mut connection = BufReader::new(connection);
    let expected = std::fs::read_to_string(Path::new(PAGES).join(name)).unwrap();
    assert_eq!(get(&mut connection, name), expected);
    for kind in ["panic", "hang"] {
        up.say(&format!("crash {kind}"));
        let survived = up.expect("survived");
        assert_eq!(survived["failover"]["summary"]["remarks"].to_string(), "[]");
        for _ in 0..20 {
            assert_eq!(get(&mut connection, name), expected);
        }
        up.expect("renewed");
    }
    up.say("quit");
    up.expect("end");
}

/// `Type=forking`, a PID file, a master with its workers.
#[test]
fn debians_nginx_keeps_its_connections() {
    let page = "index.nginx-debian.html";
    let why = unit_is_missing("nginx.service", &[("ip", "iproute2"), ("nginx", "nginx")]);
    if why.is_some() || !Path::new(PAGES).join(page).is_file() {
        orrery_testing::skipped!(
            "{}",
            why.unwrap_or_else(|| "nginx' first page is not installed".to_owned())
        );
        return;
    }
    let files = ["/etc/nginx", "/usr/share/nginx", PAGES, "/var/lib/nginx", "/var/log/nginx"];
    serves_through_panic_and_hang("nginx", page, &files, "256");
}

/// Returns whether the services are to be run that `make test` leaves out: `make soak` sets ORRERY_SERVICES, and they
/// have to be installed.
fn wanted(unit: &str, programs: &[(&str, &'static str)]) -> bool {
    let why = match std::env::var_os("ORRERY_SERVICES") {
        None => Some("ORRERY_SERVICES=1 runs it".to_owned()),
        Some(_) => unit_is_missing(unit, programs),
    };
    if let Some(why) = &why {
        orrery_testing::skipped!("{why}");
    }
    why.is_none()
}

/// `Type=forking` without a PID file, by a shell script.
#[test]
fn debians_apache_keeps_its_connections() {
    if !wanted("apache2.service", &[("ip", "iproute2"), ("apache2", "apache2")]) {
        return;
    }
    let files = [
        "/etc/apache2",
        "/etc/mime.types",
        "/usr/lib/apache2",
        "/usr/sbin/apache2",
        PAGES,
        "/var/log/apache2",
    ];
    serves_through_panic_and_hang("apache2", "index.html", &files, "512");
}

/// Runs statements of SQL, in which `_` stands for a space, before a panic, after it, and after a hang.
fn keeps_rows(up: &mut Up, ask: impl Fn(&str) -> String) {
    let mut answer = |statement: &str| {
        let deadline = std::time::Instant::now() + Duration::from_secs(180);
        loop {
            up.say(&ask(&statement.replace('_', "/**/")));
            // It may not be ready yet, and then the command fails.
            match up.answer("ran") {
                Ok(ran) => return ran["text"].as_str().unwrap().trim().to_owned(),
                Err(why) => assert!(std::time::Instant::now() < deadline, "{statement}: {why}"),
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    };
    answer("create_table_kept(number_int)");
    answer("insert_into_kept_values(41),(1)");
    up.say("crash panic");
    up.expect("survived");
    let mut answer = |statement: &str| {
        up.say(&ask(&statement.replace('_', "/**/")));
        up.expect("ran")["text"].as_str().unwrap().trim().to_owned()
    };
    assert_eq!(answer("select_sum(number)_from_kept"), "42");
    answer("insert_into_kept_values(7)");
    assert_eq!(answer("select_count(*)_from_kept"), "3");
    up.expect("renewed");
    up.say("crash hang");
    up.expect("survived");
    up.say(&ask("select/**/sum(number)/**/from/**/kept"));
    assert_eq!(up.expect("ran")["text"].as_str().unwrap().trim(), "49");
    up.say("quit");
    up.expect("end");
}

/// `AmbientCapabilities=`, io_uring where there is one, a directory that tmpfiles.d makes.
#[test]
fn debians_mariadb_keeps_its_rows() {
    if !wanted("mariadb.service", &[("mariadbd", "mariadb-server"), ("mariadb", "mariadb-client")]) {
        return;
    }
    let _one = ONE_PAIR.lock();
    let data = "/var/lib/mysql";
    let options = ["--memory", "512", "--program", "mariadbd", "--program", "mariadb"];
    let disk = ["--disk", "256M", "--mount", data, "--content", data];
    let mut up = up("mariadb", &["/etc/mysql", "/usr/share/mysql"], &[&options[..], &disk].concat());
    keeps_rows(&mut up, |statement| format!("run mariadb -N mysql -e {statement}"));
}

/// `Type=forking` with a PID file, by a script of Perl.
#[test]
fn debians_postgresql_keeps_its_rows() {
    if !wanted("postgresql@.service", &[("pg_ctlcluster", "postgresql")]) {
        return;
    }
    let Some(version) = std::fs::read_dir("/etc/postgresql").ok().and_then(|mut list| list.next()) else {
        orrery_testing::skipped!("there is no cluster of PostgreSQL");
        return;
    };
    let version = version.unwrap().file_name().into_string().unwrap();
    let _one = ONE_PAIR.lock();
    let data = "/var/lib/postgresql";
    let options = ["--memory", "1024", "--program", "id"];
    let disk = ["--disk", "256M", "--mount", data, "--content", data];
    let (libraries, shared) =
        (format!("/usr/lib/postgresql/{version}"), format!("/usr/share/postgresql/{version}"));
    let files = [
        "/etc/postgresql",
        "/etc/postgresql-common",
        "/etc/ssl/certs/ssl-cert-snakeoil.pem",
        "/etc/ssl/private/ssl-cert-snakeoil.key",
        "/usr/lib/locale",
        "/usr/lib/x86_64-linux-gnu/perl-base",
        "/usr/share/perl5/PgCommon.pm",
        "/usr/share/postgresql-common",
        "/usr/share/zoneinfo",
        &libraries,
        &shared,
    ];
    let unit = format!("postgresql@{version}-main");
    let mut up = up(&unit, &files, &[&options[..], &disk].concat());
    keeps_rows(&mut up, |statement| {
        format!(
            "run busybox su postgres -s /bin/sh -c {libraries}/bin/psql${{IFS}}-qtAc${{IFS}}'{statement}'"
        )
    });
}

/// The daemon's parent and the leader of its session have exited, as daemon(7) has it.
const DAEMON: &str = "[Service]
Type=forking
PIDFile=daemon/pid
RuntimeDirectory=daemon
User=nobody
AmbientCapabilities=CAP_NET_BIND_SERVICE
ExecStart=/bin/busybox setsid /bin/busybox sh -c 'busybox sleep 1000000 & echo $! > /run/daemon/pid'
";

#[test]
fn a_daemon_survives_without_the_leader_of_its_session() {
    if let Some(why) = missing(&[]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let unit = directory.path().join("daemon.service");
    std::fs::write(&unit, DAEMON).unwrap();
    let mut command = orthros();
    command.args(["up", "--json", "--unit", unit.to_str().unwrap()]);
    let mut up = Up::begin(command);
    up.expect("help");
    let look = |up: &mut Up| {
        up.say("status");
        let pid = up.expect("status")["status"]["service"].as_i64().unwrap();
        up.say(&format!("run busybox grep -E ^(NSpid|NSsid|CapAmb|CapEff|Name) /proc/{pid}/status"));
        let status = up.expect("ran")["text"].as_str().unwrap().to_owned();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        let [pid, session] = ["NSpid", "NSsid"].map(|name| field(name).pop().unwrap());
        assert_ne!(pid, session, "it leads its session");
        up.say("run cat /run/daemon/pid");
        assert_eq!(up.expect("ran")["text"].as_str().unwrap().trim(), pid);
        (pid, session, field("CapAmb"), field("CapEff"), field("Name"))
    };
    let before = look(&mut up);
    assert_eq!(before.2, ["0000000000000400"]);
    up.say("crash panic");
    assert_eq!(up.expect("survived")["failover"]["summary"]["remarks"].to_string(), "[]");
    assert_eq!(look(&mut up), before);
    up.say("quit");
    up.expect("end");
}

/// What leaves nothing behind, or several things, is no service.
#[test]
fn what_cannot_be_carried_over_is_told_when_it_starts() {
    if let Some(why) = missing(&[]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let unit = directory.path().join("none.service");
    for (text, expected) in [
        ("Type=oneshot\nExecStart=/bin/busybox true", "left no process"),
        ("Type=forking\nExecStart=/bin/busybox false", "exit status: 1"),
        (
            "Type=forking\nExecStart=/bin/busybox sh -c 'busybox sleep 1000 & busybox sleep 1000 &'",
            "left 2 processes (busybox",
        ),
    ] {
        std::fs::write(&unit, format!("[Service]\n{text}\n")).unwrap();
        let output = orthros().args(["up", "--json", "--unit", unit.to_str().unwrap()]).output().unwrap();
        assert!(!output.status.success());
        let told = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
        assert!(told.contains(expected), "{text}: {told}");
    }
}
