//! What a kubelet makes of a pod: the runtime's messages, from the very manifests.

use serde_json::Value;

use crate::cri::{
    CONTAINER, Capabilities, Container, ContainerMetadata, Image, LinuxContainer, LinuxSandbox, Metadata,
    Mount, NODE, Namespaces, Profile, Resources, Sandbox, SandboxSecurity, Security, Value as Number,
    Variable,
};

/// Reads a quantity of a manifest (`1536Mi`, `100m`, `2`), in thousandths.
fn thousandths(value: &Value) -> i64 {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let units = [("Ki", 1_024_000), ("Mi", 1_024_000 << 10), ("Gi", 1_024_000 << 20), ("m", 1)];
    let (number, unit) = units
        .iter()
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
        .unwrap_or((&text, 1_000));
    number.parse::<i64>().unwrap() * unit
}

fn texts(value: &Value) -> Vec<String> {
    let all = value.as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().map(|each| each.as_str().unwrap().to_owned()).collect()
}

fn seccomp(context: &Value) -> Profile {
    // RuntimeDefault, Unconfined.
    Profile { profile_type: i32::from(context["seccompProfile"]["type"] != "RuntimeDefault") }
}

fn namespaces(pod: &Value) -> Namespaces {
    // Without a network plug-in, pods are in the node's network.
    Namespaces { network: NODE, pid: if pod["hostPID"] == true { NODE } else { CONTAINER } }
}

/// Returns the sandbox of a pod.
pub(crate) fn sandbox(pod: &Value, name: &str, logs: &str, cgroup: &str) -> Sandbox {
    let uid = format!("{name}-uid");
    Sandbox {
        metadata: Some(Metadata { name: name.to_owned(), uid, namespace: "orrery-system".to_owned() }),
        log_directory: format!("{logs}/{name}"),
        linux: Some(LinuxSandbox {
            cgroup_parent: cgroup.to_owned(),
            security: Some(SandboxSecurity {
                namespaces: Some(namespaces(pod)),
                seccomp: Some(Profile { profile_type: 0 }),
            }),
        }),
    }
}

/// Returns the directories of the node that a pod's volumes need, which are made where there are none.
pub(crate) fn host_directories(pod: &Value) -> Vec<String> {
    let all = pod["volumes"].as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().filter_map(|volume| Some(volume["hostPath"]["path"].as_str()?.to_owned())).collect()
}

/// Returns a container of a pod; `empty` has a directory for each volume that is empty at first.
pub(crate) fn container(pod: &Value, spec: &Value, attempt: u32, empty: &str) -> Container {
    let context = &spec["securityContext"];
    let id = |name: &str| context[name].as_i64().map(|value| Number { value });
    let volume = |name: &Value| {
        let all = pod["volumes"].as_array().unwrap();
        let volume = all.iter().find(|volume| volume["name"] == *name).unwrap();
        let path = volume["hostPath"]["path"].as_str().map(str::to_owned);
        path.unwrap_or_else(|| format!("{empty}/{}", name.as_str().unwrap()))
    };
    let mounts = spec["volumeMounts"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mounts = mounts.iter().map(|mount| Mount {
        container_path: mount["mountPath"].as_str().unwrap().to_owned(),
        host_path: volume(&mount["name"]),
        readonly: mount["readOnly"] == true,
    });
    let environment = spec["env"].as_array().map(Vec::as_slice).unwrap_or_default();
    let envs = environment.iter().map(|variable| Variable {
        key: variable["name"].as_str().unwrap().to_owned(),
        value: variable["value"].as_str().unwrap().to_owned(),
    });
    let limits = &spec["resources"]["limits"];
    let resources = Resources {
        cpu_period: 100_000,
        cpu_quota: if limits["cpu"].is_null() { 0 } else { thousandths(&limits["cpu"]) * 100 },
        cpu_shares: 0,
        memory_limit_in_bytes: if limits["memory"].is_null() {
            0
        } else {
            thousandths(&limits["memory"]) / 1_000
        },
    };
    let paths = |all: &[&str]| all.iter().map(|path| (*path).to_owned()).collect();
    let name = spec["name"].as_str().unwrap().to_owned();
    Container {
        log_path: format!("{name}-{attempt}.log"),
        metadata: Some(ContainerMetadata { name, attempt }),
        image: Some(Image { image: spec["image"].as_str().unwrap().to_owned() }),
        command: texts(&spec["command"]),
        args: texts(&spec["args"]),
        envs: envs.collect(),
        mounts: mounts.collect(),
        linux: Some(LinuxContainer {
            resources: Some(resources),
            security: Some(Security {
                capabilities: Some(Capabilities {
                    add: texts(&context["capabilities"]["add"]),
                    drop: texts(&context["capabilities"]["drop"]),
                }),
                namespaces: Some(namespaces(pod)),
                run_as_user: id("runAsUser"),
                run_as_group: id("runAsGroup"),
                readonly_rootfs: context["readOnlyRootFilesystem"] == true,
                no_new_privs: context["allowPrivilegeEscalation"] == false,
                // As a kubelet names them for procMount: Default.
                masked_paths: paths(&[
                    "/proc/asound",
                    "/proc/acpi",
                    "/proc/kcore",
                    "/proc/keys",
                    "/proc/latency_stats",
                    "/proc/timer_list",
                    "/proc/timer_stats",
                    "/proc/sched_debug",
                    "/proc/scsi",
                    "/sys/firmware",
                ]),
                readonly_paths: paths(&[
                    "/proc/bus",
                    "/proc/fs",
                    "/proc/irq",
                    "/proc/sys",
                    "/proc/sysrq-trigger",
                ]),
                seccomp: Some(seccomp(context)),
            }),
        }),
    }
}

#[test]
fn quantities_are_read() {
    assert_eq!(thousandths(&Value::from("1536Mi")), 1_536 * 1_048_576 * 1_000);
    assert_eq!(thousandths(&Value::from("1Gi")), 1_073_741_824_000);
    assert_eq!(thousandths(&Value::from("100m")), 100);
    assert_eq!(thousandths(&Value::from(2)), 2_000);
}
