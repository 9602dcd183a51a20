//! `packaging/kubernetes`: its manifests, its chart, and what a node makes of them. There is no kubelet here: the tests do
//! with containerd what one does (`docs/src/kubernetes.md`).

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

mod chart;
mod cri;
mod node;
mod pod;

use std::fs;
use std::io::{Read as _, Write as _};

use orrery_testing::eventually;
use serde_json::{Value, json};

use chart::manifest;
use node::{Node, Pod};

const IMAGE: &str = concat!("localhost/orrery:", env!("CARGO_PKG_VERSION"));

/// Returns the inode behind the code of a file of a process, and whether it is an object.
fn code(pid: u32, name: &str) -> Option<(u64, bool)> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let line = maps.lines().find(|line| line.contains(" r-xp ") && line.contains(name))?;
    let is_object = line.contains("/orc:") || line.contains("/memfd:orc:");
    Some((line.split_whitespace().nth(4)?.parse().ok()?, is_object))
}

/// A pod such as others run: an ordinary user, filtered, without rights.
fn sleeper(image: &str) -> Value {
    json!({"containers": [{
        "name": "sleeper",
        "image": image,
        "command": ["/bin/sleep", "1000"],
        "securityContext": {
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }]})
}

/// Waits until two pods have the same objects, and returns the inode of that of the C library.
fn shared(node: &Node, pods: [&Pod; 2]) -> u64 {
    let pids = pods.map(|pod| node.pid(&pod.containers[0].1));
    for file in ["sleep", "libc.so.6"] {
        for pid in pids {
            eventually("the exchange", || code(pid, file).is_some_and(|(_, is_object)| is_object));
        }
        assert_eq!(code(pids[0], file), code(pids[1], file), "{file}");
    }
    code(pids[0], "libc.so.6").unwrap().0
}

fn in_time(status: &cri::Status) {
    assert_eq!((status.state, status.exit_code), (cri::EXITED, 0), "ended in order: {status:?}");
}

#[test]
fn a_node_runs_what_the_manifests_say() {
    let Some(store) = manifest("store.yaml") else { return };
    let (warm, class) = (manifest("warm.yaml").unwrap(), manifest("runtimeclass.yaml").unwrap());
    let runtimes =
        fs::read_to_string(orrery_testing::root().join("packaging/kubernetes/containerd.toml")).unwrap();
    let node = match Node::start(&runtimes.replace("version = 2", "")) {
        Ok(node) => node,
        Err(why) => {
            orrery_testing::skipped!("{why}");
            return;
        }
    };
    for image in ["localhost/pause:1", "localhost/one:1", "localhost/two:1"] {
        node.import(image, true, image);
    }
    match node.run("", "trial", &sleeper("localhost/one:1")) {
        Ok(pod) => drop(node.end(&pod)),
        Err(why) => {
            orrery_testing::skipped!("containerd cannot run pods here: {why}");
            return;
        }
    }
    node.import(IMAGE, false, "first");
    let store_pod = node.daemon(&store);
    assert!(node.host("/opt/orrery/bin/orrery-runc").exists(), "the runtime is installed");
    if node.has_immutable_files() {
        let logs = node.all_logs();
        assert!(!logs.contains("no objects can be made in"), "the store may use its disk: {logs}");
    }
    let handler = class["handler"].as_str().unwrap();
    let pods =
        ["one", "two"].map(|name| node.run(handler, name, &sleeper(&format!("localhost/{name}:1"))).unwrap());
    let [one, two] = &pods;
    let object = shared(&node, [one, two]);
    counts_programs(&node, &store_pod, &pods);
    answers(&node, &warm);
    serves_http(&node);
    probes_can_fail(&node, &store_pod);

    // An update: the next version's pod begins when this one has ended.
    node.import("localhost/orrery:next", false, "second");
    in_time(&node.end(&store_pod));
    let before = fs::metadata(node.host("/opt/orrery/bin/orrery")).unwrap();
    let kept = |pod: &Pod| {
        assert_eq!(node.status(&pod.containers[0].1).state, cri::RUNNING);
        assert_eq!(code(node.pid(&pod.containers[0].1), "libc.so.6"), Some((object, true)));
    };
    pods.iter().for_each(kept);
    // Without a store pods start, and share nothing.
    let alone = node.run(handler, "alone", &sleeper("localhost/one:1")).unwrap();
    let pid = node.pid(&alone.containers[0].1);
    eventually("it runs", || code(pid, "/libc.so.6").is_some());
    // It writes metrics, too, where the chart can be rendered.
    let values = json!({"image": {"tag": "next"}, "metrics": {"textfileDirectory": "/var/lib/textfile", "intervalSeconds": 1}});
    let rendered = chart::render(&values).and_then(|mut all| all.remove("\"DaemonSet\" \"orrery-store\""));
    let has_metrics = rendered.is_some();
    let next = rendered.unwrap_or_else(|| {
        let mut next = store.clone();
        for container in ["initContainers", "containers"] {
            next["spec"]["template"]["spec"][container][0]["image"] = json!("localhost/orrery:next");
        }
        next
    });
    let store_pod = node.daemon(&next);
    let metrics = node.host("/var/lib/textfile/orrery.prom");
    if has_metrics {
        eventually("metrics", || {
            fs::read_to_string(&metrics).is_ok_and(|text| text.contains("orrery_orc_info{"))
        });
    }
    let after = fs::metadata(node.host("/opt/orrery/bin/orrery")).unwrap();
    assert_ne!(
        std::os::unix::fs::MetadataExt::ino(&before),
        std::os::unix::fs::MetadataExt::ino(&after),
        "the runtime is that of the new version"
    );
    pods.iter().for_each(kept);
    let later = ["one", "two"]
        .map(|name| node.run(handler, "later", &sleeper(&format!("localhost/{name}:1"))).unwrap());
    shared(&node, [&later[0], &later[1]]);
    in_time(&node.end(&store_pod));
    assert!(!metrics.exists(), "what is no more has no metrics");

    let directory = node.finish();
    assert_eq!(node::processes_of(&directory), [0; 0], "nothing is left");
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(directory.to_str().unwrap()), "{mounts}");
    assert!(!directory.exists());
}

/// The store knows the programs of the pods, and what they share.
fn counts_programs(node: &Node, store: &Pod, pods: &[Pod]) {
    let stat = ["/usr/bin/orrery", "orc", "stat", "--json", "--directory", "/run/orrery/orc"];
    let ended = node.exec(&store.containers[0].1, &stat);
    assert_eq!(ended.status, 0, "{ended:?}");
    let stat: Value = serde_json::from_str(&ended.output).unwrap();
    let objects = stat["objects"].as_array().unwrap();
    let pids: Vec<String> = pods.iter().map(|pod| node.pid(&pod.containers[0].1).to_string()).collect();
    let is_of_both = |object: &Value| {
        object["trust_domain"] == "named containers" && pids.iter().all(|pid| object["holders"][pid].is_u64())
    };
    assert!(objects.iter().any(is_of_both), "{pids:?}: {}", ended.output);
    let domain = &stat["trust_domains"]["named containers"];
    assert!(domain["saved"].as_i64().is_some_and(|saved| saved > 0), "{}", ended.output);
}

/// The pool of interpreters answers pods of its user, and no others; a script that runs when it is to end may end.
fn answers(node: &Node, warm: &Value) {
    let pool = node.daemon(warm);
    let user = &warm["spec"]["template"]["spec"]["containers"][0]["securityContext"]["runAsUser"];
    let client = |user: &Value| {
        let mut spec = sleeper(IMAGE);
        spec["containers"][0]["securityContext"]["runAsUser"] = user.clone();
        spec["containers"][0]["volumeMounts"] = json!([{"name": "warm", "mountPath": "/run/orrery-warm"}]);
        spec["volumes"] = json!([{"name": "warm", "hostPath": {"path": "/run/orrery-warm"}}]);
        node.run("", "client", &spec).unwrap()
    };
    let run = |pod: &Pod, text: &str| {
        let command = ["/usr/bin/orrery", "warm", "run", "--socket=/run/orrery-warm/socket", "-c", text];
        node.exec(&pod.containers[0].1, &command)
    };
    let pod = client(user);
    // Files are the client's own; what a script leaves in the interpreter is undone.
    let script =
        "import builtins; print(hasattr(builtins, 'left'), open('/etc/mark').read()); builtins.left = 1";
    for _ in 0..5 {
        let ended = run(&pod, script);
        assert_eq!((ended.status, ended.output.as_str()), (0, "False first\n"), "{ended:?}");
    }
    let ended = run(&pod, "import os; os.write(2, b'x'); raise SystemExit(7)");
    assert_eq!((ended.status, ended.errors.as_str()), (7, "x"), "{ended:?}");
    let stranger = run(&client(&json!(1000)), "pass");
    assert_ne!(stranger.status, 0, "who is not its user cannot run anything: {stranger:?}");
    assert_eq!(node.probe(&pool, "livenessProbe").status, 0);
    std::thread::scope(|scope| {
        let script = scope.spawn(|| {
            run(
                &pod,
                "import time; print('begun'); open('/tmp/begun', 'w').close(); time.sleep(2); print('ended')",
            )
        });
        eventually("the script runs", || {
            node.exec(&pool.containers[0].1, &["/bin/cat", "/tmp/begun"]).status == 0
        });
        in_time(&node.end(&pool));
        let ended = script.join().unwrap();
        assert_eq!((ended.status, ended.output.as_str()), (0, "begun\nended\n"), "{ended:?}");
    });
    assert_eq!(run(&pod, "pass").status, 69, "no server listens");
}

/// The HTTP server of the interpreters' pod runs the scripts of a volume, which looks as that of a ConfigMap.
fn serves_http(node: &Node) {
    let values =
        json!({"warm": {"http": {"enabled": true, "scripts": {"hostPath": {"path": "/var/lib/volume"}}}}});
    let Some(mut all) = chart::render(&values) else { return };
    let mut warm = all.remove("\"DaemonSet\" \"orrery-warm\"").unwrap();
    // Pods have the node's network here, and its port may be in use.
    let option = json!("--listen=0.0.0.0:8000");
    let command =
        warm.pointer_mut("/spec/template/spec/containers/1/command").unwrap().as_array_mut().unwrap();
    *command.iter_mut().find(|word| **word == option).unwrap() = json!("--listen=127.0.0.1:0");
    let volume = node.host("/var/lib/volume");
    fs::create_dir_all(volume.join("..1")).unwrap();
    // The directory is another container's: it has no name here, but files in it are found.
    let script = "import os, helper\nprint(f'Content-Type: text/plain\\n\\n{helper.NAME} {os.getuid()} {open(\"helper.py\").read()}')\n";
    for (name, text) in [("answer.py", script), ("helper.py", "NAME = 'helped'\n")] {
        fs::write(volume.join("..1").join(name), text).unwrap();
        std::os::unix::fs::symlink(format!("..data/{name}"), volume.join(name)).unwrap();
    }
    std::os::unix::fs::symlink("..1", volume.join("..data")).unwrap();
    let pool = node.daemon(&warm);
    let address = orrery_testing::until("it listens", || {
        let logs = node.all_logs();
        let (_, rest) = logs.split_once("listening on http://")?;
        rest.split_whitespace().next()?.parse::<std::net::SocketAddr>().ok()
    });
    let get = |path: &str| {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let probe = &warm["spec"]["template"]["spec"]["containers"][1]["readinessProbe"]["httpGet"]["path"];
    eventually("it is ready", || get(probe.as_str().unwrap()).starts_with("HTTP/1.0 200 "));
    let answer = get("/answer.py");
    assert!(answer.ends_with("\r\n\r\nhelped 65532 NAME = 'helped'\n\n"), "{answer}\n{}", node.all_logs());
    in_time(&node.end(&pool));
}

/// A probe of a store that does not answer fails.
fn probes_can_fail(node: &Node, store: &Pod) {
    assert_eq!(node.probe(store, "livenessProbe").status, 0);
    let mut other = store.clone();
    let command = other.spec.pointer_mut("/containers/0/livenessProbe/exec/command").unwrap();
    *command.as_array_mut().unwrap().last_mut().unwrap() = json!("--socket=orc=/run/orrery/absent");
    let ended = node.probe(&other, "livenessProbe");
    assert!(ended.status == 1 && ended.errors.contains("cannot ask orc"), "{ended:?}");
}
