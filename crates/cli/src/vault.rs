//! `orrery vault`: private keys that TLS servers use without having them.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use clap::{Args, Subcommand, ValueEnum};
use openssl::pkey::{Id, PKey};

/// Keep private keys in a vault: programs use OpenSSL as ever, and never have the keys.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand)]
enum Action {
    /// Make a reference to a private key, which servers take in the key's place
    Wrap {
        /// The private key's file, in PEM: RSA, RSA-PSS, EC or Ed25519, without a passphrase
        key: PathBuf,
        /// Where to write the reference; - is standard output [default: KEY with .ref.pem for its ending]
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Print an OpenSSL configuration with the provider in it
    Conf {
        /// The provider's module
        #[arg(long, value_name = "FILE", default_value = "/usr/local/lib/orrery/orrery.so")]
        module: PathBuf,
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
        Action::Conf { module, allow } => {
            ensure!(module.is_absolute(), "{}: give the module's absolute path", module.display());
            io::stdout()
                .write_all(configuration(module, allow).as_bytes())
                .context("write to standard output")
        }
    }
}

fn wrap(key: &Path, output: Option<&Path>) -> Result<()> {
    let path = fs::canonicalize(key).with_context(|| format!("find the private key {}", key.display()))?;
    let shown = path.display();
    let pem = fs::read(&path).with_context(|| format!("read the private key {shown}"))?;
    let public = public_part(&pem).with_context(|| format!("{shown} cannot be wrapped"))?;
    let path = path.to_str().with_context(|| format!("{shown}: the path must be UTF-8"))?;
    let text = pem_of(&reference(path, &public));
    match output {
        Some(output) if output == Path::new("-") => {
            io::stdout().write_all(text.as_bytes()).context("write to standard output")?;
        }
        _ => {
            let output = output.map_or_else(|| key.with_extension("ref.pem"), Path::to_owned);
            write(&output, &text)?;
            eprintln!("{} stands for {path}", output.display());
        }
    }
    let mode = fs::metadata(path).with_context(|| format!("look at {path}"))?.mode();
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

/// The SubjectPublicKeyInfo of a private key in PEM.
fn public_part(pem: &[u8]) -> Result<Vec<u8>> {
    if String::from_utf8_lossy(pem).contains(NAME) {
        bail!("it is a reference already");
    }
    let mut asked = false;
    let key = PKey::private_key_from_pem_callback(pem, |_| {
        asked = true;
        Ok(0)
    });
    let key = match key {
        Ok(key) => key,
        Err(_) if asked => bail!(
            "it has a passphrase, for which a vault cannot ask: remove it (openssl pkey) and let only root read the file"
        ),
        Err(error) => return Err(error).context("it has no private key in PEM"),
    };
    match key.id() {
        Id::RSA | Id::RSA_PSS | Id::EC | Id::ED25519 => {}
        other => bail!("keys of this type ({other:?}) are not supported: RSA, RSA-PSS, EC and Ed25519 are"),
    }
    key.public_key_to_der().context("its public part cannot be encoded")
}

/// What a reference says, in DER (integrations/openssl/key.c).
fn reference(path: &str, public: &[u8]) -> Vec<u8> {
    let content = [element(0x02, &[1]), element(0x0c, path.as_bytes()), public.to_vec()].concat();
    element(0x30, &content)
}

/// One element of DER (X.690, 8.1).
fn element(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = content.len().to_be_bytes();
    let significant = &length[length.iter().take_while(|byte| **byte == 0).count()..];
    let mut all = vec![tag];
    match (significant, u8::try_from(significant.len())) {
        ([], _) => all.push(0),
        ([short], _) if *short < 0x80 => all.push(*short),
        (long, count) => {
            all.push(0x80 | count.unwrap_or(0));
            all.extend_from_slice(long);
        }
    }
    all.extend_from_slice(content);
    all
}

fn pem_of(der: &[u8]) -> String {
    let encoded = openssl::base64::encode_block(der);
    let mut text = format!("-----BEGIN {NAME}-----\n");
    let mut rest = encoded.as_str();
    while !rest.is_empty() {
        let (line, after) = rest.split_at(rest.len().min(64));
        text.push_str(line);
        text.push('\n');
        rest = after;
    }
    text.push_str(&format!("-----END {NAME}-----\n"));
    text
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

    #[test]
    fn lengths_are_encoded_as_der_wants_them() {
        assert_eq!(element(4, &[]), [4, 0]);
        assert_eq!(element(4, &[7; 0x7f])[..2], [4, 0x7f]);
        assert_eq!(element(4, &[7; 0x80])[..3], [4, 0x81, 0x80]);
        assert_eq!(element(4, &[7; 0x1234])[..4], [4, 0x82, 0x12, 0x34]);
    }

    #[test]
    fn a_reference_has_path_and_public_key() {
        let key = PKey::from_ec_key(
            openssl::ec::EcKey::generate(
                &openssl::ec::EcGroup::from_curve_name(openssl::nid::Nid::X9_62_PRIME256V1).unwrap(),
            )
            .unwrap(),
        )
        .unwrap();
        let public = public_part(&key.private_key_to_pem_pkcs8().unwrap()).unwrap();
        let reference = reference("/a/key.pem", &public);
        assert_eq!(reference[..5], [0x30, u8::try_from(reference.len() - 2).unwrap(), 2, 1, 1]);
        assert_eq!(&reference[5..17], b"\x0c\x0a/a/key.pem");
        assert_eq!(PKey::public_key_from_der(&reference[17..]).unwrap().id(), Id::EC);
        let pem = pem_of(&reference);
        assert!(pem.lines().all(|line| line.len() <= 64) && pem.ends_with("-----\n"));
        assert_eq!(public_part(pem.as_bytes()).unwrap_err().to_string(), "it is a reference already");
    }

    #[test]
    fn what_is_no_key_is_refused() {
        assert!(public_part(b"nonsense").unwrap_err().to_string().contains("no private key"));
        let key = PKey::generate_x25519().unwrap();
        let error = public_part(&key.private_key_to_pem_pkcs8().unwrap()).unwrap_err();
        assert!(error.to_string().contains("not supported"), "{error}");
        let cipher = openssl::symm::Cipher::aes_128_cbc();
        let locked =
            PKey::generate_ed25519().unwrap().private_key_to_pem_pkcs8_passphrase(cipher, b"word").unwrap();
        assert!(public_part(&locked).unwrap_err().to_string().contains("passphrase"));
    }
}
