//! `orrery vault`: private keys that TLS servers use without having them.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, Subcommand, ValueEnum};
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use der::asn1::Utf8StringRef;
use der::{Decode as _, Encode as _, Sequence};
use pem_rfc7468::LineEnding;
use serde::Serialize;
use spki::{ObjectIdentifier, SubjectPublicKeyInfoRef};

/// Keep private keys in a vault: programs use OpenSSL as ever, and never have the keys.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
#[command(defer = true)]
enum Action {
    /// Make a reference to a private key, which servers take in the key's place
    Wrap {
        /// The private key's file, in PEM: RSA, RSA-PSS, EC or Ed25519, without a passphrase
        key: PathBuf,
        /// Where to write the reference; - is standard output [default: KEY with .ref.pem for its ending]
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Show references: which key each stands for, and whether a vault can still load it
    ///
    /// Exits with status 1 where one cannot be used.
    List {
        /// Files, and directories in which files are looked at
        #[arg(value_name = "PATH", default_value = "/etc/ssl")]
        paths: Vec<PathBuf>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print an OpenSSL configuration with the provider in it
    Conf {
        /// The provider's module [default: lib/orrery/orrery.so beside the directory of this program, else that of
        /// /usr/local]
        #[arg(long, value_name = "FILE")]
        module: Option<PathBuf>,
        /// What the vault does beside the signatures of TLS 1.2 and 1.3
        #[arg(long, value_name = "LIST", value_delimiter = ',')]
        allow: Vec<Allowed>,
    },
}

/// What a policy can allow (integrations/openssl/policy.h).
#[derive(Clone, Copy, ValueEnum)]
enum Allowed {
    /// RSA decryption: TLS without forward secrecy, mail
    Decrypt,
    /// Signatures of MD5, SHA-1 and other digests, and of data whose digest is not named
    AnyDigest,
    /// RSA without padding, or with that of X9.31
    Raw,
}

/// The PEM's name, as the provider knows it (integrations/openssl/provider.h).
const NAME: &str = "ORRERY VAULT KEY";

/// Does what is asked.
///
/// # Errors
/// Files that cannot be read or written; keys that the vault would not take.
pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.action {
        Action::Wrap { key, output } => wrap(key, output.as_deref()),
        Action::List { paths, json } => list(paths, *json),
        Action::Conf { module, allow } => {
            let module = module.clone().unwrap_or_else(installed_module);
            ensure!(module.is_absolute(), "{}: give the module's absolute path", module.display());
            io::stdout()
                .write_all(configuration(&module, allow).as_bytes())
                .context("cannot write to standard output")
        }
    }
}

/// Returns where the provider is that was installed with this program, or, where none was, the place of one built by hand.
fn installed_module() -> PathBuf {
    let beside = |program: PathBuf| Some(program.parent()?.parent()?.join("lib/orrery/orrery.so"));
    std::env::current_exe()
        .ok()
        .and_then(beside)
        .filter(|module| module.is_file())
        .unwrap_or_else(|| "/usr/local/lib/orrery/orrery.so".into())
}

fn wrap(key: &Path, output: Option<&Path>) -> Result<()> {
    let path =
        fs::canonicalize(key).with_context(|| format!("cannot find the private key {}", key.display()))?;
    let shown = path.display();
    let public = public_part(&path).with_context(|| format!("{shown} cannot be wrapped"))?;
    let path = path.to_str().with_context(|| format!("{shown}: the path must be UTF-8"))?;
    let text = reference(path, &public).with_context(|| format!("encode the reference to {shown}"))?;
    match output {
        Some(output) if output == Path::new("-") => {
            io::stdout().write_all(text.as_bytes()).context("cannot write to standard output")?;
        }
        _ => {
            let output = output.map_or_else(|| key.with_extension("ref.pem"), Path::to_owned);
            write(&output, &text)?;
            eprintln!("{} stands for {path}", output.display());
        }
    }
    let mode = fs::metadata(path).with_context(|| format!("cannot look at {path}"))?.mode();
    if mode & 0o077 != 0 {
        eprintln!("orrery: warning: others than its owner may read {path}: chmod 600 {path}");
    }
    Ok(())
}

/// A reference is no secret; but a file that is there is replaced only if it is one, too, and never half.
fn write(output: &Path, text: &str) -> Result<()> {
    let writing = || format!("write the reference {}", output.display());
    match fs::read_to_string(output) {
        Ok(old) if !old.contains(NAME) => {
            bail!("{} is there, and is no reference: choose another --output", output.display())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(writing),
        Ok(_) => {}
    }
    let new = output.with_extension("new");
    let mut file = fs::OpenOptions::new();
    let mut file =
        file.write(true).create(true).truncate(true).mode(0o644).open(&new).with_context(writing)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).with_context(writing)?;
    fs::rename(&new, output).with_context(writing)
}

/// The version of the JSON; it grows when a key changes its meaning or goes.
const SCHEMA: u32 = 1;

/// The report for programs.
#[derive(Serialize)]
struct Report<'a> {
    schema: u32,
    references: &'a [Row],
}

/// One reference, as it is shown.
#[derive(Serialize)]
struct Row {
    reference: PathBuf,
    key: Option<String>,
    #[serde(rename = "type")]
    kind: Option<&'static str>,
    usable: bool,
    /// What is wrong with it; `None` where nothing is.
    remark: Option<String>,
}

impl Row {
    /// Looks at the reference in the file `at`, which has this text.
    fn of(at: &Path, text: &str) -> Self {
        let unreadable = |remark: String| Self {
            reference: at.to_owned(),
            key: None,
            kind: None,
            usable: false,
            remark: Some(remark),
        };
        let der = match pem_rfc7468::decode_vec(text.trim_start().as_bytes()) {
            Ok((name, der)) if name == NAME => der,
            Ok((name, _)) => return unreadable(format!("cannot read it: a PEM of {name} comes first")),
            Err(error) => return unreadable(format!("cannot read it: {error}")),
        };
        let reference = match Reference::from_der(&der) {
            Ok(reference) => reference,
            Err(error) => return unreadable(format!("cannot read it: {error}")),
        };
        let path = reference.path.as_str();
        let of = reference.public.algorithm.oid;
        let kind = KEYS.iter().find(|(known, _)| *known == of).map(|(_, name)| *name);
        let (usable, remark) = match public_part(Path::new(path)) {
            Ok(public) if !der.ends_with(&public) => {
                (false, Some("the file has another key now: wrap it again".to_owned()))
            }
            Ok(_) => {
                let mode = fs::metadata(path).map_or(0, |known| known.mode());
                let open = format!("others than its owner may read the key: chmod 600 {path}");
                (true, (mode & 0o077 != 0).then_some(open))
            }
            Err(error) => (false, Some(format!("{error:#}"))),
        };
        Self { reference: at.to_owned(), key: Some(path.to_owned()), kind, usable, remark }
    }
}

/// Prints the references in `paths`.
fn list(paths: &[PathBuf], json: bool) -> Result<()> {
    let mut rows = Vec::new();
    for path in paths {
        let is_directory =
            fs::metadata(path).with_context(|| format!("cannot look at {}", path.display()))?.is_dir();
        if !is_directory {
            let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
            rows.push(Row::of(path, &String::from_utf8_lossy(&text)));
            continue;
        }
        let entries = fs::read_dir(path).with_context(|| format!("cannot list {}", path.display()))?;
        let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        files.sort();
        // What cannot be read is a key, not a reference to one; what is no text is neither.
        let texts = files.into_iter().filter(|file| file.is_file()).filter_map(|file| {
            let text = fs::read_to_string(&file).ok()?;
            text.contains(&format!("-----BEGIN {NAME}-----")).then_some((file, text))
        });
        rows.extend(texts.map(|(file, text)| Row::of(&file, &text)));
    }
    let text = if json {
        serde_json::to_string(&Report { schema: SCHEMA, references: &rows })?
    } else {
        table(&rows)
    };
    writeln!(io::stdout(), "{text}").context("cannot write to standard output")?;
    let unusable = rows.iter().filter(|row| !row.usable).count();
    ensure!(unusable == 0, "{unusable} of {} references cannot be used", rows.len());
    Ok(())
}

/// References for people, a line each.
fn table(rows: &[Row]) -> String {
    if rows.is_empty() {
        return "No references.".to_owned();
    }
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(["REFERENCE", "TYPE", "KEY", "STATE"]);
    table.add_rows(rows.iter().map(|row| {
        let state = if row.usable { "usable" } else { "unusable" };
        let remark = row.remark.as_ref().map(|remark| format!(": {remark}")).unwrap_or_default();
        [
            row.reference.display().to_string(),
            row.kind.unwrap_or("-").to_owned(),
            row.key.as_deref().unwrap_or("-").to_owned(),
            format!("{state}{remark}"),
        ]
    }));
    table.trim_fmt()
}

/// The types of keys that a vault takes: RSA and RSA-PSS (RFC 8017, C), EC (RFC 5480, 2.1.1), Ed25519 (RFC 8410, 3).
const KEYS: [(ObjectIdentifier, &str); 4] = [
    (ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1"), "RSA"),
    (ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.10"), "RSA-PSS"),
    (ObjectIdentifier::new_unwrap("1.2.840.10045.2.1"), "EC"),
    (ObjectIdentifier::new_unwrap("1.3.101.112"), "Ed25519"),
];

/// Returns the SubjectPublicKeyInfo, in DER, of the private key in the PEM file `path`, as the `openssl` command
/// computes it.
///
/// The command is asked, rather than its library linked, because every other use of `orrery` would load that library, too.
fn public_part(path: &Path) -> Result<Vec<u8>> {
    let pem = fs::read(path).context("cannot read it")?;
    let pem = String::from_utf8_lossy(&pem);
    if pem.contains(NAME) {
        bail!("it is a reference already");
    }
    // "BEGIN ENCRYPTED PRIVATE KEY" (RFC 5958), or "Proc-Type: 4,ENCRYPTED" (RFC 1421).
    if pem.contains("ENCRYPTED") {
        bail!(
            "it has a passphrase, for which a vault cannot ask: remove it (openssl pkey) and let only root read the file"
        );
    }
    let command = Command::new("openssl")
        .args(["pkey", "-inform", "PEM", "-passin", "pass:", "-pubout", "-outform", "DER", "-in"])
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .context("cannot start openssl, of the package openssl, which reads it")?;
    if !command.status.success() {
        let said = String::from_utf8_lossy(&command.stderr);
        bail!("it has no private key in PEM: openssl says {:?}", said.lines().next().unwrap_or_default());
    }
    let public = SubjectPublicKeyInfoRef::from_der(&command.stdout)
        .context("openssl's answer is no public key in DER")?;
    let of = public.algorithm.oid;
    ensure!(
        KEYS.iter().any(|(known, _)| *known == of),
        "keys of this type ({of}) are not supported: RSA, RSA-PSS, EC and Ed25519 are"
    );
    Ok(command.stdout)
}

/// A reference (integrations/openssl/key.c).
#[derive(Sequence)]
struct Reference<'a> {
    version: u8,
    path: Utf8StringRef<'a>,
    public: SubjectPublicKeyInfoRef<'a>,
}

/// The PEM of a reference to the key in `path`, which has the public part `public`, in DER.
fn reference(path: &str, public: &[u8]) -> Result<String> {
    let public = SubjectPublicKeyInfoRef::from_der(public)?;
    let reference = Reference { version: 1, path: Utf8StringRef::new(path)?, public };
    Ok(pem_rfc7468::encode_string(NAME, LineEnding::LF, &reference.to_der()?)?)
}

fn configuration(module: &Path, allow: &[Allowed]) -> String {
    let names: Vec<_> = allow.iter().filter_map(ValueEnum::to_possible_value).collect();
    let names: Vec<_> = names.iter().map(clap::builder::PossibleValue::get_name).collect();
    let allow = if names.is_empty() { String::new() } else { format!("allow = {}\n", names.join(", ")) };
    format!(
        "# OpenSSL with private keys in a vault. Name this file in OPENSSL_CONF, or put it into openssl.cnf.\n\
         openssl_conf = orrery_openssl\n\
         \n\
         [orrery_openssl]\n\
         providers = orrery_providers\n\
         \n\
         [orrery_providers]\n\
         default = orrery_default\n\
         orrery = orrery_vault\n\
         \n\
         # As soon as one is named, the default is not there by itself.\n\
         [orrery_default]\n\
         activate = 1\n\
         \n\
         [orrery_vault]\n\
         module = {}\n\
         {allow}\
         activate = 1\n",
        module.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A key that `openssl genpkey` makes with `options`, in a file of `directory`.
    fn key(directory: &Path, options: &[&str]) -> PathBuf {
        let file = directory.join("key.pem");
        let made = Command::new("openssl")
            .arg("genpkey")
            .args(options)
            .arg("-out")
            .arg(&file)
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert!(made.success(), "{options:?}");
        file
    }

    #[test]
    fn a_reference_has_path_and_public_key() {
        let directory = tempfile::tempdir().unwrap();
        let kinds: [&[&str]; 4] = [
            &["-algorithm", "RSA"],
            &["-algorithm", "RSA-PSS"],
            &["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"],
            &["-algorithm", "ED25519"],
        ];
        for (kind, (type_, type_name)) in kinds.into_iter().zip(KEYS) {
            let key = key(directory.path(), kind);
            let public = public_part(&key).unwrap();
            let path = "/a/".to_owned() + &"long".repeat(40) + "/key.pem";
            let text = reference(&path, &public).unwrap();
            assert!(text.lines().all(|line| line.len() <= 64) && text.ends_with("-----\n"), "{text}");
            let (name, der) = pem_rfc7468::decode_vec(text.as_bytes()).unwrap();
            assert_eq!(name, NAME);
            let read = Reference::from_der(&der).unwrap();
            assert_eq!((read.version, read.path.as_str()), (1, &path[..]));
            assert_eq!(read.public.algorithm.oid, type_);
            assert!(der.ends_with(&public));

            let text = reference(key.to_str().unwrap(), &public).unwrap();
            let row = Row::of(Path::new("of.ref.pem"), &text);
            assert_eq!((row.key.as_deref(), row.kind), (key.to_str(), Some(type_name)));
            assert!(row.usable && row.remark.is_none(), "{:?}", row.remark);

            fs::write(&key, text).unwrap();
            assert_eq!(public_part(&key).unwrap_err().to_string(), "it is a reference already");
        }
    }

    #[test]
    fn what_is_no_key_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let refused = |file: &Path| public_part(file).unwrap_err().to_string();
        let file = directory.path().join("nonsense");
        fs::write(&file, "nonsense").unwrap();
        assert!(refused(&file).contains("no private key"));
        assert!(refused(&key(directory.path(), &["-algorithm", "X25519"])).contains("not supported"));
        let locked = ["-algorithm", "ED25519", "-aes-128-cbc", "-pass", "pass:word"];
        assert!(refused(&key(directory.path(), &locked)).contains("passphrase"));
    }
}
