//! Copies of a program that run from trees of files of their own, with all that it reads, and not its code alone: interpreted code,
//! archives and data, too. `orrery orc rootfs` makes trees of them whose equal files are in memory once.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;

use crate::contender::Skipped;
use crate::copies::{Running, anonymous, cached_below, drop_caches_below, files_of, terminate_with_parent};
use crate::machine;

/// Which files the copies run from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Root {
    /// Each from a tree of its own.
    Own,
    /// All from one tree.
    Common,
    /// Each from a tree that `orrery orc rootfs` has made of its own.
    Shared,
}

/// A program with all that it reads, and how it is started.
#[derive(Debug)]
pub struct Application {
    /// Its file, as the trees have it.
    program: PathBuf,
    /// Files and directories that it reads.
    parts: Vec<PathBuf>,
    /// Where its libraries are.
    libraries: BTreeSet<PathBuf>,
    arguments: Vec<OsString>,
    /// Variables with a path in the tree.
    variables: Vec<(&'static str, PathBuf)>,
    /// Whether it is ready when it listens at its pipe; else it prints that it is.
    has_pipe: bool,
    /// What the arguments name, and what copies write.
    work: TempDir,
}

/// What Python loads, and then waits.
const PYTHON: &str = "import ssl, sqlite3, json, ctypes, decimal, hashlib, lzma, bz2, asyncio, http.server\n\
                      print('ready', flush=True)\nimport sys; sys.stdin.read()";

/// What Java does: it answers a request by HTTP, and then waits.
const JAVA: &str = r#"
import com.sun.net.httpserver.HttpServer;
import java.net.*;
import java.net.http.*;
public class Server {
    public static void main(String[] arguments) throws Exception {
        HttpServer server = HttpServer.create(new InetSocketAddress(InetAddress.getLoopbackAddress(), 0), 0);
        server.createContext("/", exchange -> {
            byte[] bytes = "hello".getBytes();
            exchange.sendResponseHeaders(200, bytes.length);
            exchange.getResponseBody().write(bytes);
            exchange.close();
        });
        server.start();
        URL url = new URL("http://127.0.0.1:" + server.getAddress().getPort() + "/");
        url.openStream().readAllBytes();
        System.out.println("ready");
        System.in.read();
    }
}
"#;

/// Mounts the directories of LibreOffice of a tree, and a directory for its sockets, and executes a program.
const IN_PLACE: &str = "tree=$1; mount --bind \"$2\" /tmp || exit 1; shift 2; \
                        for part in /usr/lib/libreoffice /usr/share/libreoffice; do \
                        mount --bind \"$tree$part\" $part || exit 1; done; exec \"$@\"";

/// The directory of settings that copies of LibreOffice begin with.
const SETTINGS: &str = "settings";

/// What of a Python's library no program here reads.
const UNREAD: [&str; 6] = ["test", "dist-packages", "idlelib", "lib2to3", "ensurepip", "tkinter"];

impl Application {
    /// Returns Python with some of its library.
    ///
    /// # Errors
    /// [`Skipped`] where it is not installed.
    pub fn python() -> Result<Self> {
        let program = fs::canonicalize("/usr/bin/python3")
            .map_err(|error| Skipped(format!("/usr/bin/python3 cannot be used: {error}")))?;
        let name = program.file_name().context("a program without a name")?;
        let library = Path::new("/usr/lib").join(name);
        let mut parts = Vec::new();
        for entry in fs::read_dir(&library).with_context(|| format!("cannot list {}", library.display()))? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if !UNREAD.contains(&name.as_str()) && !name.starts_with("config-") {
                parts.push(entry.path());
            }
        }
        let arguments = ["-S", "-B", "-c", PYTHON].map(OsString::from).to_vec();
        let variables = vec![("PYTHONHOME", PathBuf::from("/usr"))];
        Self {
            program,
            parts,
            libraries: BTreeSet::new(),
            arguments,
            variables,
            has_pipe: false,
            work: tempfile::tempdir()?,
        }
        .with_libraries()
    }

    /// Returns a Java virtual machine with a small server.
    ///
    /// # Errors
    /// [`Skipped`] where there is none, or no compiler for it.
    pub fn java() -> Result<Self> {
        let work = tempfile::tempdir()?;
        let source = work.path().join("Server.java");
        fs::write(&source, JAVA)?;
        let mut javac = Command::new("javac");
        javac.arg("-d").arg(work.path()).arg(&source);
        let built = javac.output().map_err(|error| Skipped(format!("javac cannot be started: {error}")))?;
        ensure!(built.status.success(), "javac: {}", String::from_utf8_lossy(&built.stderr));
        let which = Command::new("sh").args(["-c", "command -v java"]).output()?;
        let program = fs::canonicalize(String::from_utf8(which.stdout)?.trim())
            .map_err(|error| Skipped(format!("java is not there: {error}")))?;
        let home = program.ancestors().nth(2).context("java is not in a home of its own")?.to_owned();
        let parts = ["lib", "conf", "release"].map(|part| home.join(part)).to_vec();
        let options = ["-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp"];
        let mut arguments = options.map(OsString::from).to_vec();
        arguments.extend([work.path().into(), "Server".into()]);
        Self {
            program,
            parts,
            libraries: BTreeSet::new(),
            arguments,
            variables: Vec::new(),
            has_pipe: false,
            work,
        }
        .with_libraries()
    }

    /// Returns LibreOffice, which waits for documents.
    ///
    /// # Errors
    /// [`Skipped`] where it is not installed.
    pub fn libreoffice() -> Result<Self> {
        let program = PathBuf::from("/usr/lib/libreoffice/program/soffice.bin");
        if !program.exists() {
            return Err(Skipped(format!("there is no {}", program.display())).into());
        }
        let parts = ["/usr/lib/libreoffice", "/usr/share/libreoffice"].map(PathBuf::from).to_vec();
        let arguments = ["--headless", "--norestore", "--nologo", "--nodefault"].map(OsString::from).to_vec();
        // Not in /tmp, which it has for itself.
        let work = tempfile::tempdir_in(machine::program_directory()?)?;
        let (libraries, variables) = (BTreeSet::new(), Vec::new());
        let this = Self { program, parts, libraries, arguments, variables, has_pipe: true, work };
        fs::create_dir(this.sockets())?;
        let this = this.with_libraries()?;
        // What it has made when it was started first, copies begin with.
        fs::rename(this.settings(0), this.work.path().join(SETTINGS))
            .context("LibreOffice has no settings")?;
        Ok(this)
    }

    /// Adds the libraries that the program has loaded.
    fn with_libraries(mut self) -> Result<Self> {
        let running = self.start(Path::new("/"), 0)?;
        for file in files_of(running.pid())? {
            if file != self.program && !self.parts.iter().any(|part| file.starts_with(part)) {
                self.libraries.extend(file.parent().map(Path::to_owned));
                self.parts.push(file);
            }
        }
        self.parts.push(self.program.clone());
        Ok(self)
    }

    /// Starts the program from a tree.
    fn start(&self, tree: &Path, number: usize) -> Result<Running> {
        let mut command = Command::new(in_tree(tree, &self.program));
        if self.has_pipe {
            // It looks for its files where they were installed, as in a container.
            command = Command::new("unshare");
            command
                .args(["--mount", "sh", "-c", IN_PLACE, "sh"])
                .arg(tree)
                .arg(self.sockets())
                .arg(&self.program);
        }
        command.args(&self.arguments).stderr(Stdio::null());
        for (name, path) in &self.variables {
            command.env(name, in_tree(tree, path));
        }
        if !self.libraries.is_empty() {
            let paths = self.libraries.iter().map(|path| in_tree(tree, path));
            command.env("LD_LIBRARY_PATH", std::env::join_paths(paths)?);
        }
        if self.has_pipe {
            self.start_with_pipe(&mut command, number)
        } else {
            Running::start(&mut command, "ready")
        }
    }

    /// Returns the directory that LibreOffice has in place of /tmp.
    fn sockets(&self) -> PathBuf {
        self.work.path().join("sockets")
    }

    /// Returns where a copy of LibreOffice has its settings.
    fn settings(&self, number: usize) -> PathBuf {
        self.work.path().join(number.to_string())
    }

    /// Starts LibreOffice with settings of its own, and waits until it listens.
    fn start_with_pipe(&self, command: &mut Command, number: usize) -> Result<Running> {
        let name = format!("orrery-{number}");
        command.arg(format!("--accept=pipe,name={name};urp;")).stdin(Stdio::null()).stdout(Stdio::null());
        let (settings, first) = (self.settings(number), self.work.path().join(SETTINGS));
        if first.exists() && !settings.exists() {
            let copied = Command::new("cp").arg("--archive").args([&first, &settings]).status()?;
            ensure!(copied.success(), "cannot copy the settings of LibreOffice");
        }
        command.arg(format!("-env:UserInstallation=file://{}", settings.display()));
        let pipe = format!("OSL_PIPE_{}_{name}", rustix::process::geteuid().as_raw());
        let pipe = self.sockets().join(pipe);
        // One of a copy that was ended.
        let _ = fs::remove_file(&pipe);
        terminate_with_parent(command);
        let spawn = |command: &mut Command| -> Result<Running> {
            Ok(Running(command.spawn().with_context(|| format!("cannot start {command:?}"))?))
        };
        let mut child = spawn(command)?;
        while !pipe.exists() {
            match child.0.try_wait()? {
                // It has made its settings, and wants to be started again.
                Some(status) if status.code() == Some(81) => child = spawn(command)?,
                Some(status) => anyhow::bail!("{command:?} ended with {status}"),
                None => std::thread::sleep(Duration::from_millis(50)),
            }
        }
        Ok(child)
    }
}

fn in_tree(tree: &Path, path: &Path) -> PathBuf {
    tree.join(path.strip_prefix("/").unwrap_or(path))
}

/// Trees of an application, removed with this object.
#[derive(Debug)]
pub struct Roots<'a> {
    application: &'a Application,
    directory: TempDir,
    own: Vec<PathBuf>,
    shared: Vec<PathBuf>,
}

impl<'a> Roots<'a> {
    /// Makes `count` trees of the application's files, and as many of these by `orrery orc rootfs`.
    ///
    /// # Errors
    /// [`Skipped`] where `orrery orc rootfs` cannot make trees here; those of copying.
    pub fn new(application: &'a Application, count: usize) -> Result<Self> {
        // Not in /tmp, which may be memory itself.
        let directory = tempfile::tempdir_in(machine::program_directory()?)?;
        let [own, shared] = ["own", "shared"].map(|kind| directory.path().join(kind));
        let trees = |parent: &Path| (0..count).map(|number| parent.join(number.to_string())).collect();
        let this = Self { application, own: trees(&own), shared: trees(&shared), directory };
        for tree in &this.own {
            fs::create_dir_all(tree)?;
            let mut copy = Command::new("cp");
            // With times, which Java's archives of classes are checked by.
            copy.args(["--archive", "--parents", "--reflink=auto"]).args(&application.parts).arg(tree);
            // It looks for the parents there.
            copy.current_dir("/");
            let copied = copy.output().context("cannot start cp")?;
            ensure!(copied.status.success(), "cp: {}", String::from_utf8_lossy(&copied.stderr));
        }
        let made = this.rootfs(&[], &this.own)?.output().context("cannot start orrery")?;
        if !made.status.success() {
            return Err(Skipped(String::from_utf8_lossy(&made.stderr).trim().to_owned()).into());
        }
        Ok(this)
    }

    /// Returns the command that makes trees, or does with them what the options say.
    fn rootfs(&self, options: &[&str], trees: &[PathBuf]) -> Result<Command> {
        let mut command = Command::new(machine::program_directory()?.join("orrery"));
        command.args(["orc", "rootfs", "--output"]).arg(self.directory.path().join("shared"));
        command.arg("--content").arg(self.content()).args(options).args(trees);
        Ok(command)
    }

    /// Returns where the contents of the shared trees are.
    fn content(&self) -> PathBuf {
        self.directory.path().join("content")
    }

    /// Returns how much memory `count` copies take, in bytes: cached pages of files, mapped or not, and their anonymous memory.
    ///
    /// # Errors
    /// A copy cannot be started, or has ended.
    pub fn memory(&self, root: Root, count: usize) -> Result<u64> {
        let files = match root {
            Root::Own => self.own[..count].to_vec(),
            Root::Common => self.own[..1].to_vec(),
            // Hard links, where there are no overlays, are contents, too.
            Root::Shared => vec![self.content()],
        };
        drop_caches_below(&files)?;
        let mut copies = Vec::new();
        for number in 0..count {
            let tree = match root {
                Root::Own => &self.own[number],
                Root::Common => &self.own[0],
                Root::Shared => &self.shared[number],
            };
            copies.push(self.application.start(tree, number)?);
        }
        let own: u64 = copies.iter().map(|copy| anonymous(copy.pid())).sum::<Result<_>>()?;
        Ok(cached_below(&files)? + own)
    }
}

impl Drop for Roots<'_> {
    fn drop(&mut self) {
        if let Ok(mut remove) = self.rootfs(&["--remove"], &self.own) {
            let _ = remove.output();
        }
        // Contents are immutable.
        let _ = Command::new("chattr").args(["-R", "-i"]).arg(self.directory.path()).output();
    }
}
