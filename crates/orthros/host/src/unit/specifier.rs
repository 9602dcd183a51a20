//! What `%` stands for in a unit, systemd.unit(5), "Specifiers". What differs between a host and its guests stands for
//! nothing here.

use std::fs;
use std::path::Path;

use super::name::{Name, unescape};

const HOST: &str = "/proc/sys/kernel/hostname";

/// A unit's own specifiers.
pub(super) struct Specifiers<'u> {
    pub(super) name: &'u Name,
    /// The unit's file.
    pub(super) file: &'u Path,
}

impl Specifiers<'_> {
    /// Returns the text with all of them replaced.
    pub(super) fn expand(&self, text: &str) -> Result<String, String> {
        let mut expanded = String::new();
        let mut characters = text.chars();
        while let Some(c) = characters.next() {
            if c == '%' {
                let kind = characters.next().ok_or("it ends with %; write %% for one")?;
                expanded.push_str(&self.one(kind)?);
            } else {
                expanded.push(c);
            }
        }
        Ok(expanded)
    }

    fn one(&self, kind: char) -> Result<String, String> {
        let name = self.name;
        let instance = || name.instance.clone().unwrap_or_default();
        let last = || name.prefix.rsplit('-').next().unwrap_or_default();
        let directory = || self.file.parent().unwrap_or(Path::new("/"));
        Ok(match kind {
            '%' => "%".to_owned(),
            'n' => name.full.clone(),
            'N' => name.stem().to_owned(),
            'p' => name.prefix.clone(),
            'P' => unescape(&name.prefix)?,
            'i' => instance(),
            'I' => unescape(&instance())?,
            'j' => last().to_owned(),
            'J' => unescape(last())?,
            'f' => {
                let path = unescape(name.instance.as_deref().unwrap_or(&name.prefix))?;
                format!("/{}", path.trim_start_matches('/'))
            }
            'y' => self.file.display().to_string(),
            'Y' => directory().display().to_string(),
            't' => "/run".to_owned(),
            'S' => "/var/lib".to_owned(),
            'C' => "/var/cache".to_owned(),
            'L' => "/var/log".to_owned(),
            'E' => "/etc".to_owned(),
            'T' => "/tmp".to_owned(),
            'V' => "/var/tmp".to_owned(),
            // Of the user who runs the system's units.
            'u' | 'g' => "root".to_owned(),
            'U' | 'G' => "0".to_owned(),
            'h' => "/root".to_owned(),
            's' => "/bin/sh".to_owned(),
            'H' => first_line(HOST)?,
            'l' => first_line(HOST)?.split('.').next().unwrap_or_default().to_owned(),
            'm' => first_line("/etc/machine-id")?,
            'o' => release("ID")?,
            'w' => release("VERSION_ID")?,
            'W' => release("VARIANT_ID")?,
            'M' => release("IMAGE_ID")?,
            'A' => release("IMAGE_VERSION")?,
            'B' => release("BUILD_ID")?,
            'a' => "x86-64".to_owned(),
            'b' | 'v' | 'd' | 'q' => {
                return Err(format!(
                    "%{kind} is another one in the guests, and in each of them; write what is meant"
                ));
            }
            kind => return Err(format!("%{kind} stands for nothing; write %% for a %")),
        })
    }
}

fn first_line(path: &str) -> Result<String, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("cannot read {path}: {error}"))?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

/// A field of os-release(5); one that is not there is empty.
fn release(field: &str) -> Result<String, String> {
    let path = "/etc/os-release";
    let text = fs::read_to_string(path).map_err(|error| format!("cannot read {path}: {error}"))?;
    let fields = super::environment::parse_file(&text)?;
    Ok(fields.into_iter().find(|(name, _)| name == field).map(|(_, value)| value).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn expand(name: &str, text: &str) -> Result<String, String> {
        let name = Name::parse(name).unwrap();
        Specifiers { name: &name, file: Path::new("/etc/systemd/system/x.service") }.expand(text)
    }

    #[test]
    fn specifiers_stand_for_what_they_do() {
        assert_eq!(
            expand("a-b@c-d", "%n|%N|%p|%P|%i|%I|%j|%f").unwrap(),
            "a-b@c-d.service|a-b@c-d|a-b|a/b|c-d|c/d|b|/c/d"
        );
        assert_eq!(expand("a-b", "%i%f %%n").unwrap(), "/a/b %n");
        assert_eq!(
            expand("a", "%t %S %C %L %E %T %V %Y").unwrap(),
            "/run /var/lib /var/cache /var/log /etc /tmp /var/tmp /etc/systemd/system"
        );
        assert_eq!(expand("a", "%u%U %h").unwrap(), "root0 /root");
        assert_eq!(expand("a", "%H").unwrap(), first_line(HOST).unwrap());
        assert!(expand("a", "%b").unwrap_err().contains("in the guests"));
        assert!(expand("a", "100%").is_err() && expand("a", "%!").unwrap_err().contains("%%"));
    }

    proptest! {
        #[test]
        fn what_is_doubled_comes_back(text in any::<String>()) {
            prop_assert_eq!(expand("a", &text.replace('%', "%%")).unwrap(), text);
        }
    }
}
