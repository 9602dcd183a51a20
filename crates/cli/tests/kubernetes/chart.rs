//! One source for the plain manifests and the chart: the chart.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

const PYTHON: &str = "/usr/bin/python3";

fn packaging() -> PathBuf {
    orrery_testing::root().join("packaging/kubernetes")
}

fn python(text: &str, arguments: &[&Path]) -> Output {
    Command::new(PYTHON).args(["-c", text]).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Whether Python has a module; reports a skipped test if not.
fn has_module(module: &str) -> bool {
    let import = Command::new(PYTHON).args(["-c", &format!("import {module}")]).output();
    let is_there = import.is_ok_and(|output| output.status.success());
    if !is_there {
        orrery_testing::skipped!("{PYTHON} has no module {module}");
    }
    is_there
}

/// Returns the documents of a file of YAML.
fn documents(file: &Path) -> Vec<Value> {
    let text = "import json, sys, yaml\nprint(json.dumps([one for one in yaml.safe_load_all(open(sys.argv[1])) if one]))";
    let output = python(text, &[file]);
    assert!(output.status.success(), "{}: {output:?}", file.display());
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns documents by what they are, each once.
fn by_name(documents: Vec<Value>) -> BTreeMap<String, Value> {
    let name = |document: &Value| format!("{} {}", document["kind"], document["metadata"]["name"]);
    let count = documents.len();
    let all: BTreeMap<_, _> = documents.into_iter().map(|document| (name(&document), document)).collect();
    assert_eq!(all.len(), count, "one of each name");
    all
}

/// Returns the only object of a plain manifest; reports a skipped test where YAML cannot be read.
pub(crate) fn manifest(name: &str) -> Option<Value> {
    has_module("yaml").then(|| documents(&packaging().join("manifests").join(name)).remove(0))
}

/// Returns the resources that the kustomization lists.
fn plain() -> BTreeMap<String, Value> {
    let directory = packaging().join("manifests");
    let list = documents(&directory.join("kustomization.yaml")).remove(0);
    let files = list["resources"].as_array().unwrap();
    by_name(files.iter().flat_map(|file| documents(&directory.join(file.as_str().unwrap()))).collect())
}

/// Renders the chart with these values beside the defaults; `None` where it cannot be done here, which is reported.
pub(crate) fn render(values: &Value) -> Option<BTreeMap<String, Value>> {
    if !has_module("yaml") {
        return None;
    }
    if !Command::new("go").arg("version").output().is_ok_and(|output| output.status.success()) {
        orrery_testing::skipped!("there is no go, whose template engine is Helm's");
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let (output, file) = (directory.path().join("output"), directory.path().join("values.json"));
    fs::create_dir(&output).unwrap();
    fs::write(&file, values.to_string()).unwrap();
    let mut command = Command::new(packaging().join("render"));
    command
        .arg(&output)
        .arg(&file)
        .stdin(Stdio::null())
        .env("GOCACHE", concat!(env!("CARGO_TARGET_TMPDIR"), "/go"));
    let rendered = command.output().unwrap();
    assert!(rendered.status.success(), "{}", String::from_utf8_lossy(&rendered.stderr));
    let files = fs::read_dir(&output).unwrap().flatten();
    Some(by_name(files.flat_map(|file| documents(&file.path())).collect()))
}

#[test]
fn the_plain_manifests_are_those_of_the_chart() {
    let Some(rendered) = render(&json!({})) else { return };
    let mut plain = plain();
    assert!(plain.remove("\"Namespace\" \"orrery-system\"").is_some(), "which helm makes by itself");
    assert_eq!(plain, rendered, "packaging/kubernetes/render writes them again");
    assert_eq!(plain.len(), 5);
}

#[test]
fn values_change_what_is_installed() {
    let values = json!({
        "image": {"repository": "registry.example/orrery", "tag": "7"},
        "imagePullSecrets": [{"name": "registry"}],
        "runtimeClasses": [{"name": "orrery", "handler": "orrery"}, {"name": "other", "handler": "orrery-other"}],
        "store": {"install": "", "memory": "2G", "disk": "", "arguments": ["--keep=5"]},
        "warm": {"user": 4711, "imports": ["json", "sqlite3"], "timeout": "2s", "memory": "256M"},
        "metrics": {"textfileDirectory": "/var/lib/node_exporter"},
        "networkPolicy": {"enabled": false},
    });
    let Some(mut all) = render(&values) else { return };
    assert!(all.keys().all(|name| !name.contains("NetworkPolicy")));
    assert_eq!(all["\"RuntimeClass\" \"other\""]["handler"], "orrery-other");
    let store = all.remove("\"DaemonSet\" \"orrery-store\"").unwrap()["spec"]["template"]["spec"].take();
    assert!(store["initContainers"].is_null(), "nodes have the runtime from a package");
    assert_eq!(store["imagePullSecrets"], json!([{"name": "registry"}]));
    assert_eq!(store["containers"].as_array().unwrap().len(), 2, "and metrics");
    let container = &store["containers"][0];
    assert_eq!(container["image"], "registry.example/orrery:7");
    let command = container["command"].as_array().unwrap();
    assert!(command.contains(&json!("--memory=2G")) && command.contains(&json!("--keep=5")), "{command:?}");
    assert!(!container["command"].to_string().contains("--disk"));
    let warm = all.remove("\"DaemonSet\" \"orrery-warm\"").unwrap()["spec"]["template"]["spec"].take();
    let container = &warm["containers"][0];
    assert_eq!(container["securityContext"]["runAsUser"], 4711);
    for option in ["--import=json", "--import=sqlite3", "--timeout=2s", "--memory=256M"] {
        assert!(container["command"].as_array().unwrap().contains(&json!(option)), "{option}: {container}");
    }
    assert_eq!(warm["containers"].as_array().unwrap().len(), 1, "no HTTP");
    let from = json!([{"podSelector": {"matchLabels": {"app": "balancer"}}}]);
    let http = json!({"enabled": true, "scripts": {"configMap": {"name": "mine"}}, "port": 8080, "listen": "[::]", "from": from,
        "arguments": ["--requests=7"]});
    let Some(all) = render(&json!({"warm": {"http": http, "user": 4711}})) else { return };
    let service = &all["\"Service\" \"orrery-http\""]["spec"];
    assert_eq!(service["ports"], json!([{"name": "http", "port": 8080, "targetPort": "http"}]));
    let policy = &all["\"NetworkPolicy\" \"orrery-http\""]["spec"];
    assert_eq!(policy["ingress"], json!([{"ports": [{"protocol": "TCP", "port": "http"}], "from": from}]));
    let warm = &all["\"DaemonSet\" \"orrery-warm\""]["spec"]["template"];
    for selector in [&service["selector"], &policy["podSelector"]["matchLabels"]] {
        assert_eq!(*selector, warm["metadata"]["labels"], "they select these pods");
    }
    let container = &warm["spec"]["containers"][1];
    assert_eq!(
        (&container["name"], &container["securityContext"]["runAsUser"]),
        (&json!("http"), &json!(4711))
    );
    for option in ["--requests=7", "--listen=[::]:8000"] {
        assert!(container["command"].as_array().unwrap().contains(&json!(option)), "{option}: {container}");
    }
    let volumes = warm["spec"]["volumes"].as_array().unwrap();
    assert!(volumes.contains(&json!({"name": "volume", "configMap": {"name": "mine"}})), "{volumes:?}");
    let mounts = warm["spec"].pointer("/containers").unwrap().as_array().unwrap().iter();
    let mounts = mounts.chain(warm["spec"]["initContainers"].as_array().unwrap());
    for mount in mounts.flat_map(|container| container["volumeMounts"].as_array().unwrap()) {
        assert!(volumes.iter().any(|volume| volume["name"] == mount["name"]), "{mount}");
    }
    let Some(without) = render(&json!({"warm": {"enabled": false}, "store": {"enabled": false}})) else {
        return;
    };
    assert!(without.keys().all(|name| !name.contains("DaemonSet")), "{:?}", without.keys());
}

#[test]
fn helm_renders_the_plain_manifests() {
    if !Command::new("helm").arg("version").output().is_ok_and(|output| output.status.success()) {
        orrery_testing::skipped!("there is no helm");
        return;
    }
    let mut command = Command::new("helm");
    command.args(["template", "orrery", "--namespace", "orrery-system"]).arg(packaging().join("chart"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    if !has_module("yaml") {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), output.stdout).unwrap();
    let mut plain = plain();
    plain.remove("\"Namespace\" \"orrery-system\"");
    assert_eq!(by_name(documents(file.path())), plain);
}

#[test]
fn kubectl_builds_the_kustomization() {
    if !Command::new("kubectl")
        .args(["version", "--client"])
        .output()
        .is_ok_and(|output| output.status.success())
    {
        orrery_testing::skipped!("there is no kubectl");
        return;
    }
    let mut command = Command::new("kubectl");
    let output = command.arg("kustomize").arg(packaging().join("manifests")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    if !has_module("yaml") {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), output.stdout).unwrap();
    assert_eq!(by_name(documents(file.path())), plain());
}

#[test]
fn values_have_a_schema() {
    if !has_module("yaml") || !has_module("jsonschema") {
        return;
    }
    let work = tempfile::tempdir().unwrap();
    let schema = packaging().join("chart/values.schema.json");
    let defaults = documents(&packaging().join("chart/values.yaml")).remove(0);
    let is_valid = |values: &Value| {
        let file = work.path().join("values.json");
        fs::write(&file, values.to_string()).unwrap();
        let text = "import json, jsonschema, sys\n\
                    schema = json.load(open(sys.argv[1]))\n\
                    jsonschema.Draft7Validator.check_schema(schema)\n\
                    sys.exit(0 if jsonschema.Draft7Validator(schema).is_valid(json.load(open(sys.argv[2]))) else 9)";
        let output = python(text, &[&schema, &file]);
        let status = output.status.code().unwrap();
        assert!([0, 9].contains(&status), "{}", String::from_utf8_lossy(&output.stderr));
        status == 0
    };
    assert!(is_valid(&defaults));
    for (pointer, bad) in [
        ("/store/memory", json!("1 gigabyte")),
        ("/store/disk", json!("/srv/elsewhere")),
        ("/warm/user", json!(0)),
        ("/warm/http/enabled", json!(true)),
        ("/warm/http/port", json!(0)),
        ("/warm/http/listen", json!("localhost")),
        ("/warm/imports", json!(["json; rm -rf /"])),
        ("/image/pullPolicy", json!("Sometimes")),
        ("/runtimeClasses/0/handler", json!("Orrery")),
        ("/nodeSelector", json!({})),
        ("/metrics", json!({"textfileDirectory": "", "intervalSeconds": 30, "port": 9090})),
    ] {
        let mut values = defaults.clone();
        *values.pointer_mut(pointer).unwrap() = bad;
        assert!(!is_valid(&values), "{pointer}");
    }
}

#[test]
fn the_chart_has_the_version_of_the_tree() {
    let chart = fs::read_to_string(packaging().join("chart/Chart.yaml")).unwrap();
    for key in ["version", "appVersion"] {
        let line = format!("{key}: {}", env!("CARGO_PKG_VERSION"));
        assert!(chart.lines().any(|other| other == line), "{line}");
    }
}
