//! What the tests of the vault live in: the provider built, keys of every kind, nginx, and a look into memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use openssl::pkey::PKey;
use openssl::ssl::{Ssl, SslContext, SslMethod, SslVerifyMode};
use tempfile::TempDir;

/// Nothing that a test waits for takes longer, however busy the machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A kind of private key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Rsa,
    RsaPss,
    P256,
    P384,
    Ed25519,
}

pub(crate) const KEYS: [Kind; 5] = [Kind::Rsa, Kind::RsaPss, Kind::P256, Kind::P384, Kind::Ed25519];

/// The files of a key.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    pub(crate) private: String,
    pub(crate) reference: String,
    pub(crate) certificate: String,
}

/// A directory of one test's own, with a configuration of OpenSSL, and a vault's program that no other test runs.
pub(crate) struct House {
    folder: TempDir,
}

impl House {
    /// `None`, having said so, where something is not installed.
    pub(crate) fn new() -> Option<Self> {
        for program in ["openssl", "curl", "make"] {
            if find_program(program).is_none() {
                orrery_testing::skipped!("{program} is not installed");
                return None;
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let house = Self { folder };
        let vault = house.path("orrery-vault");
        orrery_testing::copy_program(tools().join("orrery-vault"), &vault);
        let module = tools().join("orrery.so");
        let text = house.orrery(&["vault", "conf", "--module", module.to_str().unwrap()]);
        fs::write(house.configuration(), format!("{text}vault = {vault}\n")).unwrap();
        Some(house)
    }

    /// Returns the same where nginx changes its user.
    pub(crate) fn new_as_root() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            orrery_testing::skipped!("not root");
            return None;
        }
        Self::new()
    }

    /// Adds a line to the provider's section.
    pub(crate) fn configure(&self, line: &str) {
        let mut text = fs::read_to_string(self.configuration()).unwrap();
        text += line;
        text += "\n";
        fs::write(self.configuration(), text).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().unwrap().to_owned()
    }

    pub(crate) fn configuration(&self) -> PathBuf {
        self.folder.path().join("openssl.cnf")
    }

    pub(crate) fn key(&self, kind: Kind) -> Key {
        keys()[&kind].clone()
    }

    /// Returns a program, with the provider or without.
    pub(crate) fn command(&self, program: &str, with_vault: bool) -> Command {
        let mut command = Command::new(find_program(program).unwrap());
        let configuration = if with_vault { self.configuration() } else { "/dev/null".into() };
        command.env("OPENSSL_CONF", configuration);
        command
    }

    /// Returns what it prints; it must succeed.
    pub(crate) fn run(&self, program: &str, with_vault: bool, arguments: &[&str]) -> String {
        succeed(self.command(program, with_vault).args(arguments))
    }

    pub(crate) fn openssl(&self, arguments: &[&str]) -> String {
        self.run("openssl", true, arguments)
    }

    pub(crate) fn plain_openssl(&self, arguments: &[&str]) -> String {
        self.run("openssl", false, arguments)
    }

    pub(crate) fn orrery(&self, arguments: &[&str]) -> String {
        succeed(Command::new(env!("CARGO_BIN_EXE_orrery")).args(arguments))
    }

    /// Returns a program of the tests'; its path.
    pub(crate) fn own_program(&self, source: &str) -> String {
        let program = self.path(&source.replace(".c", ""));
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-o", &program]);
        succeed(compiler.arg(root().join("crates/cli/tests/vault").join(source)).arg("-lcrypto"));
        program
    }

    /// The library with what an attacker runs.
    pub(crate) fn intruder(&self) -> String {
        let (source, library) =
            (root().join("crates/cli/tests/vault/intruder.c"), self.folder.path().join("intruder.so"));
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"]);
        succeed(compiler.arg(&library).arg(source).arg("-ldl"));
        library.to_str().unwrap().to_owned()
    }
}

fn succeed(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn find_program(name: &str) -> Option<PathBuf> {
    let folders = std::env::var("PATH").unwrap_or_default();
    let all = folders.split(':').chain(["/usr/sbin", "/usr/bin"]);
    all.map(|folder| Path::new(folder).join(name)).find(|path| path.is_file())
}

/// Returns where provider and vault were built, once for all tests.
pub(crate) fn tools() -> &'static Path {
    static TOOLS: OnceLock<PathBuf> = OnceLock::new();
    TOOLS.get_or_init(|| {
        let sanitizers = orrery_testing::sanitizers().join(" ");
        let name = if sanitizers.is_empty() { "vault-provider" } else { "vault-provider-sanitized" };
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&folder).unwrap();
        let library = Path::new(env!("CARGO_BIN_EXE_orrery")).with_file_name("liborrery.a");
        assert!(library.is_file(), "{} is not there: cargo build -p orrery-capi", library.display());
        let mut make = Command::new("make");
        make.arg("-C").arg(root().join("integrations/openssl")).arg("LDFLAGS=-s");
        make.arg(format!("CFLAGS=-O2 -g {sanitizers}"));
        make.arg(format!("OUT={}", folder.display())).arg(format!("LIBORRERY={}", library.display()));
        succeed(&mut make);
        folder
    })
}

fn keys() -> &'static BTreeMap<Kind, Key> {
    static ALL: OnceLock<(BTreeMap<Kind, Key>, PathBuf)> = OnceLock::new();
    let (keys, _) = ALL.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vault-keys");
        fs::create_dir_all(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        (KEYS.into_iter().map(|kind| (kind, make_key(&folder, kind))).collect(), folder)
    });
    keys
}

fn make_key(folder: &Path, kind: Kind) -> Key {
    let file = |ending: &str| folder.join(format!("{kind:?}.{ending}")).to_str().unwrap().to_owned();
    let key = Key { private: file("pem"), reference: file("ref.pem"), certificate: file("crt") };
    let algorithm: &[&str] = match kind {
        Kind::Rsa => &["RSA", "-pkeyopt", "rsa_keygen_bits:2048"],
        Kind::RsaPss => &["RSA-PSS", "-pkeyopt", "rsa_keygen_bits:2048"],
        Kind::P256 => &["EC", "-pkeyopt", "ec_paramgen_curve:P-256"],
        Kind::P384 => &["EC", "-pkeyopt", "ec_paramgen_curve:P-384"],
        Kind::Ed25519 => &["ED25519"],
    };
    let openssl = || {
        let mut command = Command::new("openssl");
        command.env("OPENSSL_CONF", "/dev/null");
        command
    };
    succeed(openssl().args(["genpkey", "-out", &key.private, "-algorithm"]).args(algorithm));
    fs::set_permissions(&key.private, fs::Permissions::from_mode(0o600)).unwrap();
    let subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "30"];
    succeed(
        openssl()
            .args(["req", "-x509", "-new", "-key", &key.private, "-out", &key.certificate])
            .args(subject),
    );
    let mut wrap = Command::new(env!("CARGO_BIN_EXE_orrery"));
    succeed(wrap.args(["vault", "wrap", &key.private, "-o", &key.reference]));
    key
}

/// A port that nobody has, and that nobody else here is given: until it is listened to, the kernel may choose it again.
pub(crate) fn free_port() -> u16 {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    loop {
        let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        if GIVEN.lock().unwrap_or_else(PoisonError::into_inner).insert(port) {
            return port;
        }
    }
}

/// The distribution's nginx, which ends with this object.
pub(crate) struct Nginx {
    folder: TempDir,
    vault: PathBuf,
    ports: BTreeMap<Kind, (u16, SslContext)>,
}

impl Nginx {
    /// With a server for each kind of key, whose keys are in a vault or in files. `None`, having said so, without nginx.
    pub(crate) fn start(house: &House, kinds: &[Kind], in_vault: bool, directives: &str) -> Option<Self> {
        Self::start_with(house, kinds, in_vault, directives, &[])
    }

    /// Starts it with more variables in its environment.
    pub(crate) fn start_with(
        house: &House,
        kinds: &[Kind],
        in_vault: bool,
        directives: &str,
        environment: &[(&str, &str)],
    ) -> Option<Self> {
        let program = program()?;
        let folder = tempfile::tempdir().unwrap();
        let (mut servers, mut ports) = (String::new(), BTreeMap::new());
        for kind in kinds {
            let (key, port) = (house.key(*kind), free_port());
            let file = if in_vault { &key.reference } else { &key.private };
            servers += &server(port, &key.certificate, file);
            ports.insert(*kind, (port, trusting(&key)));
        }
        let configuration = write_configuration(folder.path(), directives, &servers);
        let vault = house.folder.path().join("orrery-vault");
        let nginx = Self { folder, vault, ports };
        let mut command = house.command(program.to_str().unwrap(), in_vault);
        command.envs(environment.iter().copied());
        let mut command = nginx.arguments(command, &configuration);
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{command:?}: {output:?}");
        await_that("nginx listens", || {
            nginx.ports.values().all(|(port, _)| TcpStream::connect(("127.0.0.1", *port)).is_ok())
                && nginx.workers().len() == 1
        });
        Some(nginx)
    }

    /// Returns what `nginx -t` says of a certificate and a key.
    pub(crate) fn test(house: &House, certificate: &str, key: &str) -> Option<String> {
        let program = program()?;
        let folder = tempfile::tempdir().unwrap();
        let configuration = write_configuration(folder.path(), "", &server(free_port(), certificate, key));
        let nginx = Self { folder, vault: PathBuf::new(), ports: BTreeMap::new() };
        let command = house.command(program.to_str().unwrap(), true);
        let output = nginx.arguments(command, &configuration).arg("-t").output().unwrap();
        Some(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Writes a configuration for the next reload, with servers for these kinds of keys in a vault.
    pub(crate) fn serve_only(&self, house: &House, kinds: &[Kind]) {
        let servers = kinds.iter().map(|kind| {
            let key = house.key(*kind);
            server(self.port(*kind), &key.certificate, &key.reference)
        });
        write_configuration(self.folder.path(), "", &servers.collect::<String>());
    }

    fn arguments(&self, mut command: Command, configuration: &Path) -> Command {
        let folder = self.folder.path();
        command.arg("-p").arg(folder).arg("-c").arg(configuration).arg("-e").arg(folder.join("error.log"));
        command
    }

    pub(crate) fn port(&self, kind: Kind) -> u16 {
        self.ports[&kind].0
    }

    /// The master's number; 0 while there is none.
    pub(crate) fn master(&self) -> i32 {
        let text = fs::read_to_string(self.folder.path().join("nginx.pid")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }

    /// Returns the workers that take new connections.
    pub(crate) fn workers(&self) -> Vec<i32> {
        let master = self.master();
        let children =
            fs::read_to_string(format!("/proc/{master}/task/{master}/children")).unwrap_or_default();
        let is_worker = |pid: &i32| {
            let title = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            title.starts_with(b"nginx: worker process") && memchr::memmem::find(&title, b"shutting").is_none()
        };
        children.split_whitespace().filter_map(|pid| pid.parse().ok()).filter(is_worker).collect()
    }

    /// Returns the vault's processes, the oldest first. Only root can tell.
    pub(crate) fn vault(&self) -> Vec<i32> {
        let numbers = fs::read_dir("/proc").unwrap().flatten();
        let numbers = numbers.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let mut all: Vec<(u64, i32)> = numbers
            .filter(|pid| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == self.vault))
            .map(|pid| (start_time(pid), pid))
            .collect();
        all.sort_unstable();
        all.into_iter().map(|(_, pid)| pid).collect()
    }

    /// One connection: a new session, a request, its answer.
    pub(crate) fn handshake(&self, kind: Kind) -> Result<(), String> {
        let (port, context) = &self.ports[&kind];
        converse(*port, context)
    }
}

/// Returns a client that trusts this key's certificate alone.
fn trusting(key: &Key) -> SslContext {
    let mut context = SslContext::builder(SslMethod::tls_client()).unwrap();
    context.set_ca_file(&key.certificate).unwrap();
    context.set_verify(SslVerifyMode::PEER);
    context.build()
}

/// A connection that goes on after an interruption: the kernel does not restart calls with a time limit, after a stop of the process neither
/// (signal(7)).
#[derive(Debug)]
struct Uninterrupted(TcpStream);

impl Read for Uninterrupted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.0.read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }
}

impl Write for Uninterrupted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.0.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn converse(port: u16, context: &SslContext) -> Result<(), String> {
    let told = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let socket = TcpStream::connect_timeout(&address, PATIENCE).map_err(|e| told("connect", &e))?;
    socket.set_read_timeout(Some(PATIENCE)).map_err(|e| told("timeout", &e))?;
    socket.set_write_timeout(Some(PATIENCE)).map_err(|e| told("timeout", &e))?;
    let ssl = Ssl::new(context).map_err(|e| told("new", &e))?;
    let mut stream = ssl.connect(Uninterrupted(socket)).map_err(|e| told("handshake", &e))?;
    let request = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(request).map_err(|e| told("request", &e))?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(|e| told("answer", &e))?;
    if answer.ends_with("served\n") { Ok(()) } else { Err(format!("answer: {answer:?}")) }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        let master = self.master();
        if master > 0 && is_alive(master) {
            let workers = self.workers();
            kill(master, libc::SIGTERM);
            await_death(master);
            workers.into_iter().for_each(await_death);
        }
        if std::thread::panicking() {
            let log = fs::read_to_string(self.folder.path().join("error.log")).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(10).collect();
            eprintln!("nginx said, the last line first: {tail:#?}");
        }
    }
}

/// The distribution's Apache, which ends with this object.
pub(crate) struct Apache {
    folder: TempDir,
    port: u16,
    context: SslContext,
}

impl Apache {
    /// With this way of using processes and threads. `None`, having said so, where it is not installed.
    pub(crate) fn start(house: &House, kind: Kind, processes: &str) -> Option<Self> {
        let modules = Path::new("/usr/lib/apache2/modules");
        let Some(program) = find_program("apache2").filter(|_| modules.is_dir()) else {
            orrery_testing::skipped!("apache2 is not installed (Debian: apache2-bin)");
            return None;
        };
        let (folder, key, port) = (tempfile::tempdir().unwrap(), house.key(kind), free_port());
        let at = folder.path().display();
        let module =
            |name: &str, file: &str| format!("LoadModule {name}_module {}/{file}.so\n", modules.display());
        let modules = [
            module(&format!("mpm_{processes}"), &format!("mod_mpm_{processes}")),
            module("ssl", "mod_ssl"),
            module("authz_core", "mod_authz_core"),
            module("dir", "mod_dir"),
            module("socache_shmcb", "mod_socache_shmcb"),
        ];
        fs::create_dir(folder.path().join("root")).unwrap();
        fs::write(folder.path().join("root/index.html"), "served\n").unwrap();
        for open in [folder.path(), &folder.path().join("root")] {
            fs::set_permissions(open, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let text = format!(
            "{}ServerName localhost\nPidFile {at}/pid\nErrorLog {at}/error.log\nDefaultRuntimeDir {at}\n\
             User www-data\nGroup www-data\nListen 127.0.0.1:{port}\nStartServers 2\nMutex pthread\n\
             DocumentRoot {at}/root\nSSLEngine on\nSSLSessionTickets off\nSSLCertificateFile {}\n\
             SSLCertificateKeyFile {}\n<IfModule mpm_event_module>\nThreadsPerChild 8\nMaxRequestWorkers 16\n\
             MinSpareThreads 1\nMaxSpareThreads 16\n</IfModule>\n",
            modules.concat(),
            key.certificate,
            key.reference
        );
        let configuration = folder.path().join("apache.conf");
        fs::write(&configuration, text).unwrap();
        let mut command = house.command(program.to_str().unwrap(), true);
        let command =
            command.arg("-d").arg(folder.path()).arg("-f").arg(&configuration).args(["-k", "start"]);
        let context = trusting(&key);
        let output = command.stdin(Stdio::null()).output().unwrap();
        let log = || fs::read_to_string(folder.path().join("error.log"));
        assert!(output.status.success(), "{command:?}: {output:?} {:?}", log());
        let apache = Self { folder, port, context };
        await_that("Apache listens", || {
            TcpStream::connect(("127.0.0.1", port)).is_ok() && apache.master() > 0
        });
        Some(apache)
    }

    pub(crate) fn master(&self) -> i32 {
        let text = fs::read_to_string(self.folder.path().join("pid")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }

    pub(crate) fn children(&self) -> Vec<i32> {
        let master = self.master();
        let children =
            fs::read_to_string(format!("/proc/{master}/task/{master}/children")).unwrap_or_default();
        children.split_whitespace().filter_map(|pid| pid.parse().ok()).filter(|pid| is_alive(*pid)).collect()
    }

    /// One connection: a new session, a request, its answer.
    pub(crate) fn handshake(&self) -> Result<(), String> {
        converse(self.port, &self.context)
    }
}

impl Drop for Apache {
    fn drop(&mut self) {
        let master = self.master();
        if master > 0 && is_alive(master) {
            kill(master, libc::SIGTERM);
            await_death(master);
        }
        if std::thread::panicking() {
            eprintln!(
                "Apache said: {}",
                fs::read_to_string(self.folder.path().join("error.log")).unwrap_or_default()
            );
        }
    }
}

fn program() -> Option<PathBuf> {
    let found = find_program("nginx");
    if found.is_none() {
        orrery_testing::skipped!("nginx is not installed");
    }
    found
}

fn server(port: u16, certificate: &str, key: &str) -> String {
    format!(
        "server {{ listen 127.0.0.1:{port} ssl; ssl_certificate {certificate}; ssl_certificate_key {key};\n\
         ssl_protocols TLSv1.2 TLSv1.3; ssl_ciphers ALL; location / {{ return 200 \"served\\n\"; }} }}\n"
    )
}

fn write_configuration(folder: &Path, directives: &str, servers: &str) -> PathBuf {
    let path = folder.join("nginx.conf");
    let at = folder.display();
    let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary = temporary.map(|name| format!("{name}_temp_path {at}/{name};")).concat();
    let text = format!(
        "{directives}\nuser www-data;\nworker_processes 1;\npid {at}/nginx.pid;\nerror_log {at}/error.log info;\n\
         events {{ worker_connections 256; }}\n\
         http {{ access_log off; ssl_session_cache off; ssl_session_tickets off; {temporary}\n{servers}}}\n"
    );
    fs::write(&path, text).unwrap();
    path
}

pub(crate) fn await_that(what: &str, mut good: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !good() {
        assert!(begin.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub(crate) fn kill(pid: i32, signal: i32) {
    assert!(pid > 0);
    // SAFETY: a process that this test started. It may be gone.
    unsafe { libc::kill(pid, signal) };
}

fn is_alive(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

pub(crate) fn await_death(pid: i32) {
    await_that(&format!("process {pid} ends"), || !is_alive(pid));
}

/// Returns when it was started, in clock ticks (field 22 of proc_pid_stat(5)).
fn start_time(pid: i32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let rest = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
    rest.split(' ').nth(19).and_then(|ticks| ticks.parse().ok()).unwrap_or(u64::MAX)
}

pub(crate) fn let_all_write(folder: &Path) {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
}

/// Returns what of a key nobody else may have, as it may be in memory: numbers in either order of bytes, lines of the
/// PEM.
pub(crate) fn secrets_of(key: &Key) -> Vec<(String, Vec<u8>)> {
    let pem = fs::read(&key.private).unwrap();
    let private = PKey::private_key_from_pem(&pem).unwrap();
    let mut numbers = Vec::new();
    if let Ok(rsa) = private.rsa() {
        let parts =
            [("p", rsa.p()), ("q", rsa.q()), ("dp", rsa.dmp1()), ("dq", rsa.dmq1()), ("qinv", rsa.iqmp())];
        numbers.extend(parts.map(|(name, number)| (name, number.unwrap().to_vec())));
        numbers.push(("d", rsa.d().to_vec()));
    } else if let Ok(ec) = private.ec_key() {
        numbers.push(("d", ec.private_key().to_vec()));
    }
    let mut all = Vec::new();
    for (name, number) in numbers {
        // The middle will do, should the ends be gone.
        let middle = &number[number.len() / 4..][..number.len().min(96) / 2];
        all.push((format!("{name}, big-endian"), middle.to_vec()));
        all.push((format!("{name}, little-endian"), middle.iter().rev().copied().collect()));
    }
    let text = String::from_utf8(pem).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('-')).collect();
    all.push(("a line of the file".to_owned(), lines[lines.len() / 2].as_bytes().to_vec()));
    all
}

/// Returns which of the secrets are there.
pub(crate) fn find(memory: &[u8], secrets: &[(String, Vec<u8>)]) -> Vec<String> {
    let found = secrets.iter().filter(|(_, bytes)| memchr::memmem::find(memory, bytes).is_some());
    found.map(|(name, _)| name.clone()).collect()
}

/// Looks through all of another process' memory, whatever its protection.
pub(crate) fn find_in_memory(pid: i32, secrets: &[(String, Vec<u8>)]) -> Vec<String> {
    let (found, seen) = look(pid, secrets).unwrap();
    assert!(seen > 1 << 20, "only {seen} bytes of process {pid} could be read");
    found
}

/// The same of one that may end meanwhile; with how many bytes were seen.
pub(crate) fn look(pid: i32, secrets: &[(String, Vec<u8>)]) -> std::io::Result<(Vec<String>, usize)> {
    const CHUNK: usize = 1 << 22;
    const OVERLAP: usize = 256;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let memory = fs::File::open(format!("/proc/{pid}/mem"))?;
    let (mut found, mut seen) = (Vec::new(), 0);
    let mut buffer = vec![0; CHUNK];
    for line in maps.lines().filter(|line| !line.contains("[v")) {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let (mut at, end) = (u64::from_str_radix(start, 16).unwrap(), u64::from_str_radix(end, 16).unwrap());
        while at < end {
            let wanted = usize::try_from(end - at).unwrap().min(CHUNK);
            let Ok(read @ 1..) = memory.read_at(&mut buffer[..wanted], at) else { break };
            found.extend(find(&buffer[..read], secrets).into_iter().map(|name| format!("{name} in {line}")));
            seen += read;
            at +=
                u64::try_from(if read > OVERLAP && at + read as u64 != end { read - OVERLAP } else { read })
                    .unwrap();
        }
    }
    Ok((found, seen))
}
