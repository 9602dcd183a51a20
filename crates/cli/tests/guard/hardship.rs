//! What happens when things go wrong: monitors that die, processes without end, no descriptors left.

use std::fs;
use std::process::Stdio;

use crate::scene::Scene;

#[test]
fn without_a_monitor_nothing_passes() {
    let scene = Scene::ordinary();
    let script = "trap '' TERM; echo ready; while :; do cat /etc/hostname > out 2>/dev/null; done";
    let mut guarded = scene
        .guard()
        .args(["--quiet", "--", "setsid", "sh", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(guarded.stdout.take().unwrap()));
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    std::thread::sleep(std::time::Duration::from_millis(50));
    guarded.kill().unwrap();
    guarded.wait().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(100));
    let _ = fs::remove_file(scene.work.join("out"));
    std::thread::sleep(std::time::Duration::from_millis(200));
    assert!(!scene.work.join("out").exists(), "a call passed without a monitor");
}
