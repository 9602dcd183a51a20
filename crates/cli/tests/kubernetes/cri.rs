//! The container runtime interface, as far as the tests speak it: fields of `runtime.v1` in `api.proto` of cri-api. curl
//! does HTTP/2 over a Unix socket, so no library for gRPC is needed: a message has a byte and its length before it.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use prost::Message;

macro_rules! messages {
    ($($name:ident { $($(#[$kind:meta])* $field:ident: $type:ty,)* })*) => {
        $(#[derive(Clone, PartialEq, Message)]
        pub(crate) struct $name {
            $($(#[$kind])* pub(crate) $field: $type,)*
        })*
    };
}

messages! {
    Nothing {}
    Value {
        #[prost(int64, tag = "1")] value: i64,
    }
    Metadata {
        #[prost(string, tag = "1")] name: String,
        #[prost(string, tag = "2")] uid: String,
        #[prost(string, tag = "3")] namespace: String,
    }
    Namespaces {
        #[prost(int32, tag = "1")] network: i32,
        #[prost(int32, tag = "2")] pid: i32,
    }
    Profile {
        #[prost(int32, tag = "1")] profile_type: i32,
    }
    SandboxSecurity {
        #[prost(message, optional, tag = "1")] namespaces: Option<Namespaces>,
        #[prost(message, optional, tag = "9")] seccomp: Option<Profile>,
    }
    LinuxSandbox {
        #[prost(string, tag = "1")] cgroup_parent: String,
        #[prost(message, optional, tag = "2")] security: Option<SandboxSecurity>,
    }
    Sandbox {
        #[prost(message, optional, tag = "1")] metadata: Option<Metadata>,
        #[prost(string, tag = "3")] log_directory: String,
        #[prost(message, optional, tag = "8")] linux: Option<LinuxSandbox>,
    }
    RunSandbox {
        #[prost(message, optional, tag = "1")] config: Option<Sandbox>,
        #[prost(string, tag = "2")] runtime_handler: String,
    }
    // Requests that name a sandbox or a container, and answers that do.
    Id {
        #[prost(string, tag = "1")] id: String,
    }
    StopContainer {
        #[prost(string, tag = "1")] id: String,
        #[prost(int64, tag = "2")] timeout: i64,
    }
    ContainerMetadata {
        #[prost(string, tag = "1")] name: String,
        #[prost(uint32, tag = "2")] attempt: u32,
    }
    Image {
        #[prost(string, tag = "1")] image: String,
    }
    Variable {
        #[prost(string, tag = "1")] key: String,
        #[prost(string, tag = "2")] value: String,
    }
    Mount {
        #[prost(string, tag = "1")] container_path: String,
        #[prost(string, tag = "2")] host_path: String,
        #[prost(bool, tag = "3")] readonly: bool,
    }
    Resources {
        #[prost(int64, tag = "1")] cpu_period: i64,
        #[prost(int64, tag = "2")] cpu_quota: i64,
        #[prost(int64, tag = "3")] cpu_shares: i64,
        #[prost(int64, tag = "4")] memory_limit_in_bytes: i64,
    }
    Capabilities {
        #[prost(string, repeated, tag = "1")] add: Vec<String>,
        #[prost(string, repeated, tag = "2")] drop: Vec<String>,
    }
    Security {
        #[prost(message, optional, tag = "1")] capabilities: Option<Capabilities>,
        #[prost(message, optional, tag = "3")] namespaces: Option<Namespaces>,
        #[prost(message, optional, tag = "5")] run_as_user: Option<Value>,
        #[prost(message, optional, tag = "12")] run_as_group: Option<Value>,
        #[prost(bool, tag = "7")] readonly_rootfs: bool,
        #[prost(bool, tag = "11")] no_new_privs: bool,
        #[prost(string, repeated, tag = "13")] masked_paths: Vec<String>,
        #[prost(string, repeated, tag = "14")] readonly_paths: Vec<String>,
        #[prost(message, optional, tag = "15")] seccomp: Option<Profile>,
    }
    LinuxContainer {
        #[prost(message, optional, tag = "1")] resources: Option<Resources>,
        #[prost(message, optional, tag = "2")] security: Option<Security>,
    }
    Container {
        #[prost(message, optional, tag = "1")] metadata: Option<ContainerMetadata>,
        #[prost(message, optional, tag = "2")] image: Option<Image>,
        #[prost(string, repeated, tag = "3")] command: Vec<String>,
        #[prost(string, repeated, tag = "4")] args: Vec<String>,
        #[prost(message, repeated, tag = "6")] envs: Vec<Variable>,
        #[prost(message, repeated, tag = "7")] mounts: Vec<Mount>,
        #[prost(string, tag = "11")] log_path: String,
        #[prost(message, optional, tag = "15")] linux: Option<LinuxContainer>,
    }
    CreateContainer {
        #[prost(string, tag = "1")] sandbox: String,
        #[prost(message, optional, tag = "2")] config: Option<Container>,
        #[prost(message, optional, tag = "3")] sandbox_config: Option<Sandbox>,
    }
    StatusRequest {
        #[prost(string, tag = "1")] id: String,
        #[prost(bool, tag = "2")] verbose: bool,
    }
    Status {
        #[prost(int32, tag = "3")] state: i32,
        #[prost(int32, tag = "7")] exit_code: i32,
        #[prost(string, tag = "10")] reason: String,
        #[prost(string, tag = "11")] message: String,
    }
    StatusAnswer {
        #[prost(message, optional, tag = "1")] status: Option<Status>,
        #[prost(message, repeated, tag = "2")] info: Vec<Variable>,
    }
    Exec {
        #[prost(string, tag = "1")] id: String,
        #[prost(string, repeated, tag = "2")] command: Vec<String>,
        #[prost(int64, tag = "3")] timeout: i64,
    }
    ExecAnswer {
        #[prost(bytes = "vec", tag = "1")] stdout: Vec<u8>,
        #[prost(bytes = "vec", tag = "2")] stderr: Vec<u8>,
        #[prost(int32, tag = "3")] exit_code: i32,
    }
}

/// `NODE` of `NamespaceMode`; `POD` is 0.
pub(crate) const NODE: i32 = 2;
/// `CONTAINER` of `NamespaceMode`.
pub(crate) const CONTAINER: i32 = 1;
/// `CONTAINER_RUNNING` and `CONTAINER_EXITED` of `ContainerState`.
pub(crate) const RUNNING: i32 = 1;
pub(crate) const EXITED: i32 = 2;

/// Speaks to the runtime at a socket.
pub(crate) struct Runtime {
    pub(crate) socket: PathBuf,
}

impl Runtime {
    /// Calls a method of the service, and returns its answer, or what the runtime reports.
    pub(crate) fn call<A: Message + Default>(
        &self,
        method: &str,
        request: &impl Message,
    ) -> Result<A, String> {
        let mut body = vec![0];
        body.extend(u32::try_from(request.encoded_len()).unwrap().to_be_bytes());
        request.encode(&mut body).unwrap();
        let headers = tempfile::NamedTempFile::new().unwrap();
        let mut command = Command::new("curl");
        command.args(["--silent", "--show-error", "--http2-prior-knowledge", "--max-time", "300"]);
        command.args(["--header", "content-type: application/grpc", "--header", "te: trailers"]);
        command.args(["--data-binary", "@-", "--unix-socket"]).arg(&self.socket);
        command.arg("--dump-header").arg(headers.path());
        command.arg(format!("http://localhost/runtime.v1.RuntimeService/{method}"));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot run curl: {error}"))?;
        child.stdin.take().unwrap().write_all(&body).map_err(|error| error.to_string())?;
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&std::fs::read(headers.path()).unwrap()).into_owned();
        if !said.lines().any(|line| line.trim() == "grpc-status: 0") || output.stdout.len() < 5 {
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            return Err(format!("{method}: {}{error}", said.trim()));
        }
        A::decode(&output.stdout[5..]).map_err(|error| error.to_string())
    }
}
