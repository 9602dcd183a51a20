//! What is taken for what: files of file systems that replace one another, descriptors, and clients in containers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use orrery_orc_client::{Client, Flags};

use crate::guest::{TALK, Workshop};
use crate::unmodified::run;
use crate::{Store, eventually};

/// An image that is mounted by a loop device; unmounted when this is dropped.
struct Image(PathBuf);

impl Image {
    /// Mounts it; `None` where that cannot be done.
    fn mount(image: &Path, at: &Path) -> Option<Self> {
        fs::create_dir_all(at).unwrap();
        let output = Command::new("mount").args(["-o", "loop,ro"]).arg(image).arg(at).output().unwrap();
        if !output.status.success() {
            orrery_testing::skipped!("no image can be mounted: {}", String::from_utf8_lossy(&output.stderr));
            return None;
        }
        Some(Self(at.to_owned()))
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // A loop device is released when its file system is; the store may still read.
        eventually("the image is unmounted", || {
            Command::new("umount").arg(&self.0).stderr(Stdio::null()).status().unwrap().success()
        });
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> usize {
    bytes.windows(wanted.len()).position(|window| window == wanted).unwrap()
}

/// Two images with equal inodes, sizes and times, as reproducible builds make them; one takes the place of the other.
#[test]
fn the_files_of_an_image_that_replaced_another_are_its_own() {
    replace_images(&[]);
}

#[test]
fn so_they_are_where_mounts_have_no_unique_numbers() {
    replace_images(&[("ORRERY_ORC_KERNEL", "old")]);
}

fn replace_images(variables: &[(&str, &str)]) {
    let (store, workshop) = (Store::with_variables(variables, &[]), Workshop::new());
    let _ = store.client();
    let source =
        "const char version[] = \"version-of-the-image:1\"; const char *get(void) { return version; }
        const char constant[40000] = {1};";
    let library = workshop.library("libversion.so", source, &[]);
    let image = workshop.path("image1");
    let directory = workshop.path("tree");
    fs::create_dir(&directory).unwrap();
    fs::copy(library, directory.join("libversion.so")).unwrap();
    let made = Command::new("mkfs.ext4")
        .args(["-q", "-O", "^has_journal", "-d"])
        .arg(&directory)
        .arg(&image)
        .arg("4M")
        .stderr(Stdio::null())
        .status();
    if !made.is_ok_and(|status| status.success()) {
        orrery_testing::skipped!("mkfs.ext4 is missing");
        return;
    }
    let mut bytes = fs::read(&image).unwrap();
    let text = b"version-of-the-image:";
    let at = find(&bytes, text) + text.len();
    bytes[at] = b'2';
    let other = workshop.path("image2");
    fs::write(&other, bytes).unwrap();
    let at = workshop.path("mounted");
    let program = format!(
        "{TALK} int main(void) {{ const char *(*get)(void) = dlsym(load(\"{}/libversion.so\"), \"get\"); puts(get()); }}",
        at.display()
    );
    let program = workshop.program("print", &program, &[]);
    let print = || {
        let mut command = run(&store, &[program.to_str().unwrap()]);
        let output = command.envs(variables.iter().copied()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    for (image, version) in [(&image, 1), (&other, 2), (&image, 1)] {
        let Some(_mounted) = Image::mount(image, &at) else { return };
        // When it is not known, and when it is.
        for _ in 0..3 {
            assert_eq!(print(), format!("version-of-the-image:{version}\n"));
        }
    }
}

/// A program that puts a socket of its own at every descriptor that may be the auditor's, or closes them.
const DAEMON: &str = "
#include <sys/socket.h>
int main(int count, char **arguments) {
    int pair[2], most = 0;
    load(arguments[1]);
    socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair);
    write(pair[1], \"request\", 7);
    for (int fd = 800; fd < 1000; fd++)
        if (arguments[3][0] == 'd' ? fcntl(fd, F_GETFD) >= 0 : fd >= 900 && fd < 910) {
            if (arguments[3][0] == 'c') close(fd); else dup2(pair[0], fd);
            most = fd;
        }
    alarm(60);
    load(arguments[2]);
    char bytes[300];
    /* Nothing was sent to the client, and nothing that it sent was read. */
    long sent = recv(pair[1], bytes, sizeof bytes, MSG_DONTWAIT);
    long left = recv(pair[0], bytes, sizeof bytes, MSG_DONTWAIT);
    printf(\"%d %ld %ld\\n\", most > 0, sent, left);
}
";

#[test]
fn a_descriptor_of_the_programs_own_is_never_taken_for_the_connection() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let program = workshop.program("daemon", &format!("#include <fcntl.h>\n{TALK}{DAEMON}"), &[]);
    for how in ["dup-connection", "occupy", "close"] {
        // What the store does not know it is asked for.
        let libraries = [1, 2].map(|number| {
            let source = format!(
                "const char constant[40000] = \"{how} {number}\"; int f(void) {{ return {number}; }}"
            );
            workshop.library(&format!("lib{how}{number}.so"), &source, &[])
        });
        let [first, second] = libraries.map(|path| path.to_str().unwrap().to_owned());
        let output = run(&store, &[program.to_str().unwrap(), &first, &second, how]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "1 -1 7\n", "{how}: {output:?}");
    }
}

/// Runs `orrery orc stat` in namespaces of its own, and returns what it printed.
fn stat_in(store: &Store, namespaces: &[&str]) -> Option<String> {
    let output = Command::new("unshare")
        .args(namespaces)
        .args([env!("CARGO_BIN_EXE_orrery"), "orc", "stat", "--json", "--objects", "--directory"])
        .arg(store.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        // A client in any namespace is served: only the namespace may be refused.
        assert!(said.starts_with("unshare: "), "{namespaces:?}: {said}");
        orrery_testing::skipped!("{namespaces:?}: {said}");
        return None;
    }
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn the_superuser_of_a_container_is_no_administrator() {
    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only the superuser can see what other users have");
        return;
    }
    let store = Store::new(&[]);
    let _ = store.client();
    let path = store.path().to_owned();
    let _held = crate::confidential::as_user(4321, move || {
        Client::connect_to(&path).unwrap().register(b"what another user has", Flags::none()).unwrap()
    });
    let sees = |text: &str| text.contains("user 4321");
    let own = stat_in(&store, &["--uts"]);
    assert!(own.is_none_or(|text| sees(&text)), "on the host it is");
    for namespaces in [&["--mount"][..], &["--pid", "--fork"], &["--user", "--map-root-user"]] {
        let text = stat_in(&store, namespaces);
        assert!(text.is_none_or(|text| !sees(&text)), "{namespaces:?}");
    }
}

#[test]
fn the_secret_is_not_in_the_directory_that_containers_get() {
    let store = Store::new(&[]);
    let _ = store.client();
    let mut waiting = vec![store.path().to_owned()];
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(directory).unwrap().flatten() {
            let found = entry.metadata().unwrap();
            if found.is_dir() {
                waiting.push(entry.path());
            }
            assert!(!found.is_file() || found.len() != 32, "{:?}", entry.path());
        }
    }
    assert_eq!(fs::read(crate::secret(store.path())).unwrap().len(), 32);
}

#[test]
fn threads_with_the_smallest_stacks_run() {
    let (store, workshop) = (Store::new(&[]), Workshop::new());
    let _ = store.client();
    let source = "
#include <limits.h>
#include <pthread.h>
static void *add(void *number) { ++*(int *)number; return NULL; }
int main(void) {
    int number = 0;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    for (size_t size = PTHREAD_STACK_MIN; size <= 65536; size += 4096) {
        pthread_t thread;
        if (pthread_attr_setstacksize(&attributes, size) || pthread_create(&thread, &attributes, add, &number))
            say(-(int)size);
        else
            pthread_join(thread, NULL);
    }
    say(number);
}
";
    let program = workshop.program("small", &format!("{TALK}{source}"), &["-pthread"]);
    let plain = Command::new(&program).output().unwrap();
    for limit in ["unlimited", "256", "64"] {
        let script = format!("ulimit -s {limit} && exec {}", program.display());
        let output = run(&store, &["sh", "-c", &script]).output().unwrap();
        assert_eq!(output.stdout, plain.stdout, "{limit}: {output:?}");
    }
}
