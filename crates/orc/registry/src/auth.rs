//! Who a registry is asked as: passwords from the files that Docker and Podman keep, and the tokens that they are exchanged for.

use std::collections::HashMap;
use std::env;
use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use orrery_orc_registry::reference::Reference;
use serde::Deserialize;

/// Bytes of the largest file of passwords.
const MAX_FILE: u64 = 4 << 20;

/// What a registry gets for a token. It is never printed.
pub(crate) enum Credentials {
    /// A user's name and password, as Basic authentication writes them.
    Password { user: String, password: String },
    /// A token with which further ones are asked for.
    Identity(String),
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct AuthFile {
    auths: HashMap<String, Entry>,
    creds_store: Option<String>,
    cred_helpers: HashMap<String, String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    auth: Option<String>,
    identitytoken: Option<String>,
}

/// What a helper of Docker prints.
#[derive(Deserialize)]
struct Helped {
    #[serde(rename = "Username")]
    user: String,
    #[serde(rename = "Secret")]
    secret: String,
}

/// Returns the credentials for what is referred to, from the file that is named or else from the first that has some.
pub(crate) fn find(named: Option<&Path>, reference: &Reference) -> Result<Option<Credentials>> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(file) = named.map(Path::to_owned).or_else(|| variable("REGISTRY_AUTH_FILE")) {
        let failed = || format!("cannot read the passwords in {}", file.display());
        return find_in(&file, reference).with_context(failed);
    }
    let home = variable("HOME");
    let below = |home: &Option<PathBuf>, path: &str| home.as_ref().map(|home| home.join(path));
    let config = variable("XDG_CONFIG_HOME").or_else(|| below(&home, ".config"));
    let docker = variable("DOCKER_CONFIG").or_else(|| below(&home, ".docker"));
    let files = [
        below(&variable("XDG_RUNTIME_DIR"), "containers/auth.json"),
        below(&config, "containers/auth.json"),
        below(&docker, "config.json"),
    ];
    for file in files.into_iter().flatten() {
        let found = match find_in(&file, reference) {
            Err(error) if is_absent(&error) => None,
            other => other.with_context(|| format!("cannot read the passwords in {}", file.display()))?,
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

fn is_absent(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    matches!(kind, Some(ErrorKind::NotFound | ErrorKind::NotADirectory))
}

fn find_in(file: &Path, reference: &Reference) -> Result<Option<Credentials>> {
    if fs::metadata(file)?.len() > MAX_FILE {
        bail!("it has more than 4 MiB");
    }
    // An error of the parser could show a part of a password.
    let read: AuthFile =
        serde_json::from_slice(&fs::read(file)?).ok().context("it is no JSON of this form")?;
    let names = names(reference);
    let helper = names.iter().find_map(|name| Some((name, read.cred_helpers.get(name)?)));
    if let Some((name, helper)) = helper {
        return ask_helper(helper, name);
    }
    for name in &names {
        let Some(entry) = read.auths.get(name) else { continue };
        if let Some(token) = entry.identitytoken.clone().filter(|token| !token.is_empty()) {
            return Ok(Some(Credentials::Identity(token)));
        }
        if let Some(auth) = entry.auth.as_ref().filter(|auth| !auth.is_empty()) {
            let decoded = STANDARD.decode(auth.trim()).ok().and_then(|bytes| String::from_utf8(bytes).ok());
            let pair = decoded.as_deref().and_then(|text| text.trim_end_matches('\0').split_once(':'));
            let (user, password) = pair.with_context(|| format!("its entry {name} is not in base64"))?;
            return Ok(Some(Credentials::Password { user: user.to_owned(), password: password.to_owned() }));
        }
        if let Some(helper) = &read.creds_store {
            return ask_helper(helper, name);
        }
    }
    Ok(None)
}

/// Returns the names under which credentials for a reference can stand, the most particular first.
fn names(reference: &Reference) -> Vec<String> {
    let host = &reference.host;
    let mut names = Vec::new();
    let mut path = Some(reference.repository.as_str());
    while let Some(part) = path {
        names.push(format!("{host}/{part}"));
        path = part.rsplit_once('/').map(|(before, _)| before);
    }
    names.extend([host.clone(), format!("https://{host}")]);
    names.extend(["", "v1/", "v2/"].map(|version| format!("https://{host}/{version}")));
    if host == "docker.io" {
        names.extend(["https://index.docker.io/v1/", "index.docker.io"].map(str::to_owned));
    }
    names
}

/// Asks a program of Docker's for the credentials of a registry (`docker-credential-NAME get`).
fn ask_helper(helper: &str, name: &str) -> Result<Option<Credentials>> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if helper.is_empty() || !helper.bytes().all(is_plain) {
        bail!("the name of a credential helper has other characters than letters, digits, dots and dashes");
    }
    let program = format!("docker-credential-{helper}");
    let mut child = Command::new(&program)
        .arg("get")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot execute {program}"))?;
    if let Some(mut input) = child.stdin.take() {
        // One that does not read its input answers nevertheless, or fails.
        let _ = input.write_all(name.as_bytes());
    }
    let output = child.wait_with_output().with_context(|| format!("cannot read what {program} prints"))?;
    if !output.status.success() {
        // It has none for this registry.
        return Ok(None);
    }
    let helped: Helped = serde_json::from_slice(&output.stdout)
        .ok()
        .with_context(|| format!("{program} prints no credentials"))?;
    Ok(Some(match helped.user.as_str() {
        "<token>" => Credentials::Identity(helped.secret),
        _ => Credentials::Password { user: helped.user, password: helped.secret },
    }))
}

impl Credentials {
    /// Returns the value of the header of Basic authentication.
    pub(crate) fn basic(&self) -> Option<String> {
        match self {
            Self::Password { user, password } => {
                Some(format!("Basic {}", STANDARD.encode(format!("{user}:{password}"))))
            }
            Self::Identity(_) => None,
        }
    }
}

/// What a registry asks for with the status 401 (RFC 9110, 11.6.1).
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String> },
}

impl Challenge {
    /// Reads the values of headers `WWW-Authenticate`, the first that is known.
    pub(crate) fn parse<'a>(values: impl Iterator<Item = &'a str>) -> Option<Self> {
        values.filter_map(Self::parse_one).next()
    }

    fn parse_one(value: &str) -> Option<Self> {
        let (scheme, rest) = value.trim().split_once(' ').unwrap_or((value.trim(), ""));
        if scheme.eq_ignore_ascii_case("basic") {
            return Some(Self::Basic);
        }
        if !scheme.eq_ignore_ascii_case("bearer") {
            return None;
        }
        let (mut realm, mut service, mut rest) = (None, None, rest.trim_start());
        while let Some((name, after)) = rest.split_once('=') {
            let (value, after) = match after.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"')?,
                None => after.split_once(',').unwrap_or((after, "")),
            };
            match name.trim() {
                "realm" => realm = Some(value.to_owned()),
                "service" => service = Some(value.to_owned()),
                _ => {}
            }
            rest = after.trim_start_matches([',', ' ']);
        }
        Some(Self::Bearer { realm: realm?, service })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_understood() {
        let parse = |text: &str| Challenge::parse(std::iter::once(text));
        let bearer = |realm: &str, service: Option<&str>| {
            Some(Challenge::Bearer { realm: realm.to_owned(), service: service.map(str::to_owned) })
        };
        assert_eq!(parse("Basic realm=\"x\""), Some(Challenge::Basic));
        assert_eq!(parse("basic"), Some(Challenge::Basic));
        assert_eq!(
            parse(r#"Bearer realm="https://a/t",service="r.io",scope="repository:a,b:pull,push""#),
            bearer("https://a/t", Some("r.io"))
        );
        assert_eq!(parse("bearer realm=https://a/t, error=x"), bearer("https://a/t", None));
        for bad in ["Bearer service=\"x\"", "Bearer realm=\"x", "Bearer", "Digest realm=\"x\"", ""] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_most_particular_entry_counts() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("auth.json");
        let entry = |text: &str| format!(r#"{{"auth":"{}"}}"#, STANDARD.encode(text));
        let text = format!(
            r#"{{"auths":{{"reg.example":{},"reg.example/team":{},"https://other.example/v1/":{}}},"unknown":1}}"#,
            entry("host:a"),
            entry("team:b:c"),
            entry("other:d")
        );
        fs::write(&file, text).unwrap();
        let found = |reference: &str| match find_in(&file, &reference.parse().unwrap()).unwrap() {
            Some(Credentials::Password { user, password }) => Some((user, password)),
            _ => None,
        };
        let pair = |user: &str, password: &str| Some((user.to_owned(), password.to_owned()));
        assert_eq!(found("reg.example/x"), pair("host", "a"));
        assert_eq!(found("reg.example/team/x"), pair("team", "b:c"));
        assert_eq!(found("other.example/x"), pair("other", "d"));
        assert_eq!(found("none.example/x"), None);
        fs::write(&file, r#"{"auths":{"reg.example":{"auth":"secret!"}}}"#).unwrap();
        let error = find_in(&file, &"reg.example/x".parse().unwrap()).err().unwrap();
        assert!(!format!("{error:#}").contains("secret"), "{error:#}");
    }
}
