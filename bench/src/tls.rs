//! The distribution's nginx serving TLS, its private keys in its memory or elsewhere, and clients that ask it once per
//! session.

use std::collections::HashSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use openssl::ssl::{Ssl, SslContext, SslMethod, SslVerifyMode};
use tempfile::TempDir;

use crate::contender::{Contender, Sample, Skipped};
use crate::machine;

/// How many clients ask at the same time.
const CLIENTS: u32 = 4;
/// A server that has not come up by then never will.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The kinds of keys: a name, and what `openssl genpkey` makes them of.
pub const KEYS: [(&str, &[&str]); 4] = [
    ("rsa4096", &["RSA", "-pkeyopt", "rsa_keygen_bits:4096"]),
    ("rsa2048", &["RSA", "-pkeyopt", "rsa_keygen_bits:2048"]),
    ("p256", &["EC", "-pkeyopt", "ec_paramgen_curve:P-256"]),
    ("p384", &["EC", "-pkeyopt", "ec_paramgen_curve:P-384"]),
];

/// The place where nginx signs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signs {
    /// In its workers, as it was made.
    Itself,
    /// In a vault.
    InVault,
    /// In a vault that signs with the OpenSSL that nginx has, too: what the vault itself costs.
    InVaultByOpenSsl,
    /// In a child of each worker, which has nothing to do but this (`bench/rivals/forked_signer.c`): the least that another
    /// process can cost.
    InChild,
}

impl Signs {
    fn is_in_vault(self) -> bool {
        matches!(self, Self::InVault | Self::InVaultByOpenSsl)
    }
}

/// An nginx, which ends with this object.
pub struct Server {
    directory: TempDir,
    client: SslContext,
    ports: Vec<(&'static str, u16)>,
    cpu: Option<usize>,
}

impl Server {
    /// Starts it, on this CPU only where one is given; clients then use the others.
    ///
    /// # Errors
    /// [`Skipped`] where nginx is not installed; where it does not come up.
    pub fn start(signs: Signs, cpu: Option<usize>) -> Result<Self> {
        program()?;
        let directory = tempfile::tempdir().context("cannot make a directory for a server")?;
        let mut client = SslContext::builder(SslMethod::tls_client())?;
        client.set_verify(SslVerifyMode::NONE);
        let mut server = Self { directory, client: client.build(), ports: Vec::new(), cpu };
        let mut blocks = String::new();
        for (name, algorithm) in KEYS {
            let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
            let (key, certificate) = server.make_key(name, algorithm, signs.is_in_vault())?;
            blocks += &format!(
                "server {{ listen 127.0.0.1:{port} ssl; ssl_certificate {certificate}; ssl_certificate_key {key};\n\
                 location / {{ return 200 \"served\\n\"; }} }}\n"
            );
            server.ports.push((name, port));
        }
        server.launch(&blocks, signs)?;
        Ok(server)
    }

    fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    /// Returns a key's file, or its reference, and its certificate.
    fn make_key(&self, name: &str, algorithm: &[&str], in_vault: bool) -> Result<(String, String)> {
        let (key, certificate) = (self.path(&format!("{name}.pem")), self.path(&format!("{name}.crt")));
        run(plain("openssl").args(["genpkey", "-out", &key, "-algorithm"]).args(algorithm))?;
        let request = ["req", "-x509", "-new", "-subj", "/CN=localhost", "-key", &key, "-out", &certificate];
        run(plain("openssl").args(request))?;
        if !in_vault {
            return Ok((key, certificate));
        }
        let reference = self.path(&format!("{name}.ref.pem"));
        let orrery = machine::program_directory()?.join("orrery");
        run(plain(orrery).args(["vault", "wrap", &key, "-o", &reference]))?;
        Ok((reference, certificate))
    }

    fn launch(&self, blocks: &str, signs: Signs) -> Result<()> {
        let at = self.directory.path().display();
        let temporary = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
        let temporary = temporary.map(|name| format!("{name}_temp_path {at}/{name};")).concat();
        let text = format!(
            "user www-data;\nworker_processes 1;\npid {at}/pid;\nerror_log {at}/error.log;\n\
             events {{ worker_connections 512; }}\n\
             http {{ access_log off; ssl_session_cache off; ssl_session_tickets off; {temporary}\n{blocks}}}\n"
        );
        fs::write(self.path("nginx.conf"), text)?;
        let mut command = plain(program()?);
        command.args(["-p", &at.to_string(), "-c", &self.path("nginx.conf"), "-e", &self.path("error.log")]);
        match signs {
            Signs::Itself => {}
            Signs::InVault | Signs::InVaultByOpenSsl => {
                let module = build_provider(self.directory.path())?;
                let orrery = machine::program_directory()?.join("orrery");
                let mut configuration = run(plain(orrery).args(["vault", "conf", "--module"]).arg(module))?;
                if signs == Signs::InVaultByOpenSsl {
                    configuration += "signer = openssl\n";
                }
                fs::write(self.path("openssl.cnf"), configuration)?;
                command.env("OPENSSL_CONF", self.path("openssl.cnf"));
            }
            Signs::InChild => {
                command.env("LD_PRELOAD", build_signer(self.directory.path())?);
            }
        }
        run(&mut command)?;
        let begin = Instant::now();
        while self.ports.iter().any(|(name, _)| self.handshake(name).is_err()) {
            if begin.elapsed() > TIMEOUT {
                bail!("nginx does not come up: {}", fs::read_to_string(self.path("error.log"))?);
            }
            thread::sleep(Duration::from_millis(5));
        }
        if let Some(cpu) = self.cpu {
            for pid in self.processes()? {
                machine::pin_process(pid, cpu)?;
            }
        }
        Ok(())
    }

    fn master(&self) -> Result<u32> {
        Ok(fs::read_to_string(self.path("pid")).context("cannot look for nginx")?.trim().parse()?)
    }

    /// Returns the PIDs of master, workers, their children, and the vault.
    fn processes(&self) -> Result<Vec<u32>> {
        let vault = self.directory.path().join("orrery-vault");
        let mut ours = HashSet::from([self.master()?]);
        let mut others = Vec::new();
        for entry in fs::read_dir("/proc").context("cannot list processes")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let parent =
                status.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse::<u32>().ok());
            if fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == vault) {
                ours.insert(pid);
            } else if let Some(parent) = parent {
                others.push((pid, parent));
            }
        }
        loop {
            let known = ours.len();
            ours.extend(
                others
                    .iter()
                    .filter(|(_, parent)| ours.contains(parent))
                    .map(|(pid, _)| *pid)
                    .collect::<Vec<_>>(),
            );
            if ours.len() == known {
                return Ok(ours.into_iter().collect());
            }
        }
    }

    /// Returns the CPU time of these processes, all threads together.
    fn processor_time(processes: &[u32]) -> Result<Duration> {
        let mut sum = 0;
        for pid in processes {
            for task in
                fs::read_dir(format!("/proc/{pid}/task")).context("a process of the server is gone")?
            {
                let text =
                    fs::read_to_string(task?.path().join("schedstat")).context("cannot read schedstat")?;
                sum += text.split(' ').next().unwrap_or_default().parse::<u64>().context("schedstat")?;
            }
        }
        Ok(Duration::from_nanos(sum))
    }

    /// Runs one session: connect, handshake, request, answer, close.
    fn handshake(&self, key: &str) -> Result<()> {
        let (_, port) = self.ports.iter().find(|(name, _)| *name == key).context("no such key")?;
        let socket = TcpStream::connect(("127.0.0.1", *port))?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        let stream = Ssl::new(&self.client)?.connect(socket);
        let mut stream = stream.map_err(|error| anyhow!("handshake: {error}"))?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        ensure!(answer.ends_with("served\n"), "nginx answered {answer:?}");
        Ok(())
    }
}

impl Contender for Server {
    /// `KEY time`: so many sessions from several clients at once, timed by the clock; `KEY cpu`: by what the server's
    /// processes ran.
    fn measure(&mut self, work: &str, iterations: u32) -> Result<Sample> {
        let (key, clock) = work.split_once(' ').context("the work is a key and a clock")?;
        let processes = self.processes()?;
        let left = AtomicU32::new(iterations);
        let (before, begin) = (Self::processor_time(&processes)?, Instant::now());
        thread::scope(|scope| -> Result<()> {
            let clients: Vec<_> = (0..CLIENTS)
                .map(|_| {
                    scope.spawn(|| {
                        if let Some(cpu) = self.cpu {
                            machine::avoid(cpu)?;
                        }
                        while left
                            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1))
                            .is_ok()
                        {
                            self.handshake(key)?;
                        }
                        Ok(())
                    })
                })
                .collect();
            clients
                .into_iter()
                .try_for_each(|client| client.join().map_err(|_| anyhow!("a client panicked"))?)
        })?;
        let elapsed = match clock {
            "cpu" => Self::processor_time(&processes)?.saturating_sub(before),
            _ => begin.elapsed(),
        };
        Ok(Sample { iterations, elapsed, latencies: Vec::new() })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Ok(master) = self.master() else { return };
        let Some(pid) = i32::try_from(master).ok().and_then(rustix::process::Pid::from_raw) else { return };
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).ok();
        let begin = Instant::now();
        while Path::new(&format!("/proc/{master}/task/{master}/children")).exists()
            && begin.elapsed() < TIMEOUT
        {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Returns a program without our provider.
fn plain(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env("OPENSSL_CONF", "/dev/null");
    command
}

fn run(command: &mut Command) -> Result<String> {
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn program() -> Result<PathBuf> {
    let path = Path::new("/usr/sbin/nginx");
    if !path.is_file() {
        return Err(Skipped("nginx is not installed (Debian: nginx)".to_owned()).into());
    }
    Ok(path.to_owned())
}

/// Builds the provider with its vault, with the C library beside this program.
fn build_provider(directory: &Path) -> Result<PathBuf> {
    let library = machine::program_directory()?.join("liborrery.a");
    ensure!(
        library.exists(),
        "there is no {} (cargo build --release -p orrery-capi -p orrery-signer)",
        library.display()
    );
    let mut make = plain("make");
    make.arg("-C").arg(machine::source_root().join("integrations/openssl")).arg("LDFLAGS=-s");
    make.arg(format!("OUT={}", directory.display())).arg(format!("LIBORRERY={}", library.display()));
    run(&mut make)?;
    Ok(directory.join("orrery.so"))
}

/// Returns the module that makes a child sign for a server.
fn build_signer(directory: &Path) -> Result<PathBuf> {
    let signer = directory.join("forked_signer.so");
    let mut cc = plain("cc");
    cc.args(["-std=gnu11", "-O2", "-shared", "-fPIC", "-o"]).arg(&signer);
    cc.arg(machine::source_root().join("bench/rivals/forked_signer.c")).arg("-ldl");
    run(&mut cc)?;
    Ok(signer)
}
