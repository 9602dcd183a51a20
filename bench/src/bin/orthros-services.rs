//! `make bench B=orthros-services`: services that people use, whose kernel dies under them while a client is at it: how long the
//! client waits, and that it loses nothing. redis, counting over one connection; nano, typed into over a network terminal;
//! MariaDB, in the middle of a transaction. Beside a reboot of the same machine and the service's start, after which the
//! client's connection, its transaction and what was typed would be lost.

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use orrery_bench::pairs::{Client, LineClient, PairSpec, Running, clients};
use orrery_bench::report::Report;
use orrery_bench::{Options, Skipped};
use orrery_orthros_host::{Fault, command};
use orrery_report::record::Record;
use orrery_testing::mariadb;

const REDIS: [&str; 9] =
    ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--dir", "/data", "--appendonly", "yes"];
const TERMINFO: &str = "/lib/terminfo/v/vt100";
/// Rows before and after the death, all in one transaction.
const ROWS: u32 = 100;

/// The longest wait of a client when the kernel died, and for a service that was started again, in ms.
type Waits = (f64, f64);

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn redis(fault: Fault) -> Result<Waits> {
    let mut running = Running::start(&PairSpec {
        service: &REDIS,
        programs: &[],
        files: &[],
        memory: 256,
        append: "",
        disk: Some((64, None)),
    })?;
    let mut client = Client::start(6379, "INCR count\r\n")?;
    std::thread::sleep(Duration::from_secs(1));
    client.reset_longest_wait();
    running.crash(fault)?;
    let waited = client.longest()? * 1e3;
    let counted = client.end()?;
    let next = LineClient::connect(6379)?.ask("INCR count\r\n")?;
    ensure!(next == format!(":{}", counted + 1), "redis counted on from {counted} with {next}");
    let begin = Instant::now();
    running.pair.reboot()?;
    while !LineClient::connect(6379)?.ask("INCR count\r\n")?.starts_with(':') {}
    Ok((waited, milliseconds(begin.elapsed())))
}

fn nano(fault: Fault) -> Result<Waits> {
    command::require("nano", "nano").map_err(|error| Skipped(error.to_string()))?;
    let service = ["orrery-guest", "terminal", "23", "nano", "-I", "/data/text"];
    let mut running = Running::start(&PairSpec {
        service: &service,
        programs: &["nano"],
        files: &[(TERMINFO, TERMINFO)],
        memory: 256,
        append: "",
        disk: Some((64, None)),
    })?;
    let mut typist = clients::Typist::connect(23)?;
    let mut typed = String::new();
    for letter in ('a'..='z').cycle().take(60) {
        typist.key(letter)?;
        typed.push(letter);
    }
    // Whoever types while nothing is there sees it when the service lives again.
    let begin = Instant::now();
    running.crash(fault)?;
    typist.key('0')?;
    let waited = milliseconds(begin.elapsed());
    typed.push('0');
    for letter in ('a'..='z').take(10) {
        typist.key(letter)?;
        typed.push(letter);
    }
    typist.press(b"\x0f", "Write")?;
    typist.press(b"\r", "Wrote")?;
    let text = running.pair.run(&["cat", "/data/text"])?;
    ensure!(text.trim_end() == typed, "typed were {typed}, and written {text}");
    let begin = Instant::now();
    running.pair.reboot()?;
    clients::Typist::connect(23)?.key('0')?;
    Ok((waited, milliseconds(begin.elapsed())))
}

fn mariadb(fault: Fault) -> Result<Waits> {
    for (program, package) in [
        ("mariadbd", "mariadb-server-core"),
        ("mariadb-install-db", "mariadb-server-core"),
        ("mariadb", "mariadb-client-core"),
    ] {
        command::require(program, package).map_err(|error| Skipped(error.to_string()))?;
    }
    let content = tempfile::tempdir()?;
    let install = Command::new("mariadb-install-db")
        .args(mariadb::INSTALL)
        .arg(format!("--datadir={}/db", content.path().display()))
        .output()?;
    ensure!(install.status.success(), "mariadb-install-db: {}", String::from_utf8_lossy(&install.stderr));
    let mut running = Running::start(&PairSpec {
        service: &mariadb::SERVER,
        programs: &[],
        files: &mariadb::FILES.map(|name| (name, name)),
        memory: 512,
        append: "",
        disk: Some((256, Some(content.path()))),
    })?;
    let mut client = clients::Sql::connect(3306)?;
    client.ask("create database d; create table d.t (a int primary key) engine=innodb; begin;")?;
    let insert =
        |client: &mut clients::Sql, row: u32| client.ask(&format!("insert into d.t values ({row});"));
    for row in 0..ROWS {
        insert(&mut client, row)?;
    }
    let begin = Instant::now();
    running.crash(fault)?;
    insert(&mut client, ROWS)?;
    let waited = milliseconds(begin.elapsed());
    for row in ROWS + 1..2 * ROWS {
        insert(&mut client, row)?;
    }
    client.ask("commit;")?;
    let answer = client.ask("select concat(count(*), ' ', sum(a)) from d.t;")?;
    let right = format!("{} {}", 2 * ROWS, ROWS * (2 * ROWS - 1));
    ensure!(answer == right, "the table holds {answer:?}, not {right:?}");
    drop(client);
    let begin = Instant::now();
    running.pair.reboot()?;
    clients::Sql::connect(3306)?.ask("select 1;")?;
    Ok((waited, milliseconds(begin.elapsed())))
}

type Measure = fn(Fault) -> Result<Waits>;

fn main() -> Result<ExitCode> {
    let options = Options::from_command_line("Services whose kernel dies under them");
    let runs = if options.quick() { 1 } else { 7 };
    let cases: [(&str, Measure, Fault); 4] = [
        ("redis/panic", redis, Fault::Panic),
        ("nano/panic", nano, Fault::Panic),
        ("mariadb/panic", mariadb, Fault::Panic),
        ("redis/hang", redis, Fault::Hang),
    ];
    let mut report = Report::default();
    for (case, measure, fault) in cases.into_iter().filter(|(case, ..)| options.chosen(case)) {
        let mut pairs = Vec::new();
        while pairs.len() < runs
            && let Some(waits) = report.present(case, measure(fault))
        {
            pairs.push(waits);
        }
        if !pairs.is_empty() {
            let rival = "reboot + service start";
            report.records.push(Record::new("orthros-services", case, "ms", rival, pairs, false));
        }
    }
    report.finish("orthros-services", options.all())
}
