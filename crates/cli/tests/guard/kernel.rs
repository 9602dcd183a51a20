//! Policies that the kernel holds by itself, as far as opening files goes.

use std::fs;

use crate::scene::{Scene, built, text};

/// Returns a scene whose policy names nothing that differs by process. `None` where the kernel cannot hold it.
fn scene(executable: &str) -> Option<Scene> {
    let program = built("attack").to_str().unwrap();
    let scene = Scene::new(&format!("execute = [\"/usr\", \"{program}\"{executable}]\n"));
    scene.change(|policy| {
        let policy = policy
            .replace("\"/proc/self\",", &format!("\"{program}\","))
            .replace("\"/dev\",", "\"/dev/null\", \"/dev/zero\", \"/dev/urandom\", \"/dev/shm\",");
        format!("mediation = \"kernel\"\n{policy}")
    });
    let checked = scene.guard().arg("--check").output().unwrap();
    let said = text(&checked.stderr);
    if said.contains("there is no Landlock") {
        orrery_testing::skipped!("{}", said.trim());
        return None;
    }
    assert!(checked.status.success(), "{said}");
    Some(scene)
}

#[test]
fn what_is_allowed_happens_as_without_guard() {
    let Some(scene) = scene(", \"WORK\"") else { return };
    scene.same("echo one > a; cat a; ls -l . | wc -l; mv a b; ln b c; ln -s b d; cat c d; rm b; ls; mkdir -p x/y; rmdir x/y");
    scene.same(
        "umask 027; touch a; mkdir b; mkfifo c; stat -c '%a %n' a b c; umask 0; touch d; stat -c '%a' d",
    );
    scene.same("mkfifo p; (echo through > p) & cat p; cat < /dev/null; echo x > /dev/null; echo y | cat");
    scene.same("truncate -s 5 f; stat -c %s f; touch -d 2020-01-02 f; stat -c %y f; chmod 640 f; stat -c %a f; cp -a f g; stat -c '%a %y %s' g");
    scene.same("cp /usr/bin/true t; ./t && echo executed; exec 3<> f; echo x >&3; : > f; stat -c %s f");
    scene.same(
        "/usr/bin/python3 -c 'import os; t = os.open(\".\", os.O_TMPFILE | os.O_RDWR, 0o600); os.write(t, b\"x\"); print(os.fstat(t).st_size)
p = os.open(\".\", os.O_PATH); print(os.listdir(p) if False else os.stat(\".\", dir_fd=p).st_mode)'",
    );
}

#[test]
fn what_is_not_allowed_is_refused() {
    let Some(scene) = scene("") else { return };
    let secret = scene.secret.to_str().unwrap();
    for program in [
        vec!["cat", secret],
        vec!["cp", "/etc/passwd", secret],
        vec!["sh", "-c", "echo x > /root/there"],
        vec!["sh", "-c", "echo x >> /etc/passwd"],
        vec!["truncate", "-s", "0", secret],
        vec!["rm", "-f", secret],
        vec!["ln", secret, "x"],
        vec!["touch", "/usr/there"],
        vec!["ls", "/root"],
        vec!["sh", "-c", "ln -s $0 l; cat l", secret],
    ] {
        let output = scene.run(&program);
        assert!(!output.status.success(), "{program:?}: {output:?}");
    }
    assert_eq!(fs::read_to_string(&scene.secret).unwrap(), "SECRET");
}

/// The attacks on names, races and the monitor get no more than where the monitor opens everything.
#[test]
fn attacks_are_held() {
    for name in ["race-path", "race-link", "race-directory", "execution", "flood", "death", "monitor"] {
        let Some(scene) = scene("") else { return };
        let output = std::os::unix::process::CommandExt::process_group(
            scene
                .guard()
                .args(["--quiet", "--"])
                .arg(built("attack"))
                .arg(name)
                .args([&scene.work, &scene.secret]),
            0,
        )
        .output()
        .unwrap();
        let said = text(&output.stdout);
        assert!(output.status.success() && said.contains("held"), "{name}: {output:?}");
        assert_eq!(fs::read_to_string(&scene.secret).unwrap(), "SECRET", "{name}");
    }
}

#[test]
fn who_decides_is_told() {
    let Some(kernel) = scene("") else { return };
    let told = |scene: &Scene, options: &[&str]| {
        let output = scene.guard().args(options).arg("--explain").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        text(&output.stdout)
    };
    let line = |told: &str| told.lines().next().unwrap().to_owned();
    assert!(line(&told(&kernel, &[])).contains("the kernel"));
    let ordinary = Scene::ordinary();
    assert!(line(&told(&ordinary, &[])).contains("refusals are to be reported"));
    let quiet = line(&told(&ordinary, &["--quiet"]));
    assert!(quiet.contains("the monitor") && quiet.contains("/proc/self"), "{quiet}");
    ordinary.change(|policy| format!("mediation = \"kernel\"\n{policy}"));
    let refused = ordinary.run(&["touch", "started"]);
    assert_eq!(refused.status.code(), Some(125));
    assert!(text(&refused.stderr).contains("the kernel cannot hold this policy by itself: /proc/self"));
    assert!(!ordinary.work.join("started").exists());
}
