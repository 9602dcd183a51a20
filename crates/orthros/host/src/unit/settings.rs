//! What becomes of each setting: it is honoured, it is reported as not applied, or it is refused.
//!
//! In the guests nothing runs but the service, without systemd. What only keeps a program from things (of which most
//! are not there), or says what systemd does before, beside or after it, may be left out, and is reported. What gives
//! the program something that it would miss is refused; so is what is not known here.

use std::collections::BTreeSet;

use super::syntax::Setting;
use super::values::{boolean, is_limit};

/// What becomes of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Treatment {
    Honoured,
    Reported,
    /// It describes, and does nothing.
    Nothing,
    /// Why, and what to do.
    Refused(&'static str),
}

use Treatment::{Honoured, Nothing, Refused, Reported};

const OWN: &str =
    "; leave it out in a drop-in, or in a file of your own that --unit names by its absolute path";
const FILES: &str = "the guests have the files that are taken along, and no others in their places; take along with --file what \
                     the service needs, and leave this out in a drop-in";
const GIVEN: &str = "in the guests there is nobody who hands over descriptors or credentials; have the program open what it \
                     needs itself (--file), and leave this out in a drop-in";
const RIGHTS: &str = "the guests give no rights but those of a user; name a user (User=) who has them, and leave this out in a drop-in";
const SPACE: &str = "a guest has one network and one of everything; leave this out in a drop-in";
const COMMANDS: &str = "beside the service nothing is run in the guests; do it in ExecStartPre=, or in the program, and leave this \
                        out in a drop-in";

const HONOURED: [&str; 31] = [
    "Type",
    "PIDFile",
    "AmbientCapabilities",
    "ExecStart",
    "ExecStartPre",
    "PermissionsStartOnly",
    "ExecSearchPath",
    "Environment",
    "EnvironmentFile",
    "UnsetEnvironment",
    "WorkingDirectory",
    "User",
    "Group",
    "SupplementaryGroups",
    "UMask",
    "Nice",
    "NoNewPrivileges",
    "IgnoreSIGPIPE",
    "RuntimeDirectory",
    "RuntimeDirectoryMode",
    "StateDirectory",
    "StateDirectoryMode",
    "CacheDirectory",
    "CacheDirectoryMode",
    "LogsDirectory",
    "LogsDirectoryMode",
    "ConfigurationDirectory",
    "ConfigurationDirectoryMode",
    "ReadWritePaths",
    "ReadWriteDirectories",
    "BusName",
];
const REFUSED: [(&str, &str); 28] = [
    ("RootDirectory", FILES),
    ("RootImage", FILES),
    ("MountImages", FILES),
    ("ExtensionImages", FILES),
    ("ExtensionDirectories", FILES),
    ("BindPaths", FILES),
    ("BindReadOnlyPaths", FILES),
    ("Sockets", GIVEN),
    ("OpenFile", GIVEN),
    ("USBFunctionDescriptors", GIVEN),
    ("USBFunctionStrings", GIVEN),
    ("StandardInput", GIVEN),
    ("StandardInputText", GIVEN),
    ("StandardInputData", GIVEN),
    ("LoadCredential", GIVEN),
    ("LoadCredentialEncrypted", GIVEN),
    ("SetCredential", GIVEN),
    ("SetCredentialEncrypted", GIVEN),
    ("ImportCredential", GIVEN),
    ("DynamicUser", RIGHTS),
    ("PAMName", RIGHTS),
    ("SecureBits", RIGHTS),
    ("Delegate", SPACE),
    ("NetworkNamespacePath", SPACE),
    ("IPCNamespacePath", SPACE),
    ("UserNamespacePath", SPACE),
    ("Personality", SPACE),
    ("ExecCondition", COMMANDS),
];
/// Families that keep the service from something, share resources out between services, or say what is done about it.
const REPORTED: [&str; 64] = [
    "AllowedCPUs",
    "AllowedMemoryNodes",
    "AppArmorProfile",
    "BPFProgram",
    "BlockIO",
    "CPU",
    "CapabilityBoundingSet",
    "CoredumpFilter",
    "CoredumpReceive",
    "DefaultMemory",
    "DefaultStartupMemory",
    "DelegateSubgroup",
    "DeviceAllow",
    "DevicePolicy",
    "DisableControllers",
    "ExecPaths",
    "ExecReload",
    "ExecStartPost",
    "ExecStop",
    "ExitType",
    "FailureAction",
    "FileDescriptorStore",
    "FinalKillSignal",
    "GuessMainPID",
    "IO",
    "IPAccounting",
    "IPAddress",
    "IPEgress",
    "IPIngress",
    "InaccessibleDirectories",
    "InaccessiblePaths",
    "KeyringMode",
    "Kill",
    "LockPersonality",
    "Log",
    "ManagedOOM",
    "Memory",
    "Mount",
    "NFTSet",
    "NUMA",
    "NoExecPaths",
    "NonBlocking",
    "NotifyAccess",
    "OOM",
    "PassEnvironment",
    "Private",
    "ProcSubset",
    "Protect",
    "ReadOnly",
    "ReloadSignal",
    "RemainAfterExit",
    "RemoveIPC",
    "Restart",
    "Restrict",
    "RootDirectoryStartOnly",
    "RootEphemeral",
    "RootHash",
    "RootImage",
    "RootVerity",
    "RuntimeDirectoryPreserve",
    "RuntimeMaxSec",
    "RuntimeRandomizedExtraSec",
    "SELinuxContext",
    "SendSIG",
];
const REPORTED_TOO: [&str; 21] = [
    "SetLoginEnvironment",
    "Slice",
    "SmackProcessLabel",
    "SocketBind",
    "StandardError",
    "StandardOutput",
    "StartLimit",
    "Startup",
    "SuccessExitStatus",
    "SurviveFinalKillSignal",
    "Syslog",
    "SystemCall",
    "TTY",
    "Tasks",
    "TemporaryFileSystem",
    "Timeout",
    "TimerSlackNSec",
    "Utmp",
    "Watchdog",
    "RebootArgument",
    "SuccessAction",
];
const UNKNOWN: &str = "what this does is not known here, and it might change what the program sees";

/// Returns what becomes of a setting, if it is known.
fn known(section: &str, key: &str) -> Option<Treatment> {
    match section {
        // Who needs whom, and when it is started: here it is alone, and is started by command.
        "Unit" if ["Description", "Documentation", "SourcePath"].contains(&key) => Some(Nothing),
        "Unit" => Some(Reported),
        "Install" => Some(Nothing),
        name if name.starts_with("X-") => Some(Nothing),
        "Service" if key.starts_with("X-") => Some(Nothing),
        "Service" => {
            if HONOURED.contains(&key) || is_limit(key) {
                return Some(Honoured);
            }
            if let Some((_, why)) = REFUSED.iter().find(|(name, _)| *name == key) {
                return Some(Refused(why));
            }
            REPORTED.iter().chain(&REPORTED_TOO).any(|family| key.starts_with(family)).then_some(Reported)
        }
        _ => None,
    }
}

/// Returns whether the paths that are bound are only sockets of this host's log, which the guests lack: a program
/// that finds none goes on.
fn binds_logs(value: &str) -> bool {
    value.split_whitespace().all(|word| {
        let source = word.trim_start_matches('-').split(':').next().unwrap_or_default();
        source == "/dev/log" || source.starts_with("/run/systemd/journal/")
    })
}

/// All settings of a unit, in the order in which they count.
pub(super) struct Settings(pub(super) Vec<Setting>);

impl Settings {
    /// Returns the values of a setting of the service, after the last empty one.
    pub(super) fn list(&self, key: &str) -> Vec<&Setting> {
        self.of("Service", key)
    }

    fn of(&self, section: &str, key: &str) -> Vec<&Setting> {
        let mut values = Vec::new();
        for setting in self.0.iter().filter(|setting| setting.section == section && setting.key == key) {
            if setting.value.is_empty() {
                values.clear();
            } else {
                values.push(setting);
            }
        }
        values
    }

    /// The last value of a setting of the service, unless it is empty.
    pub(super) fn last(&self, key: &str) -> Option<&Setting> {
        self.list(key).pop()
    }

    /// Returns whether a setting of the service is yes.
    pub(super) fn is_set(&self, key: &str) -> crate::Result<Option<bool>> {
        let value = |setting: &Setting| boolean(&setting.value).map_err(|why| setting.refuse(why));
        self.last(key).map(value).transpose()
    }

    /// The names of what is reported, in order.
    ///
    /// # Errors
    ///
    /// What is refused.
    pub(super) fn left_out(&self) -> crate::Result<Vec<&str>> {
        let (mut reported, mut seen) = (Vec::new(), BTreeSet::new());
        for setting in &self.0 {
            let (section, key) = (setting.section.as_str(), setting.key.as_str());
            let treatment = known(section, key).unwrap_or(Refused(UNKNOWN));
            let values = self.of(section, key);
            // Where there is nothing to do, it is done.
            let nothing = match (key, values.last()) {
                ("CapabilityBoundingSet", _) => false,
                ("StandardInput", Some(last)) => last.value == "null",
                // A nought may be a number, as in TimeoutStopSec=0.
                (_, Some(last)) => last.value != "0" && boolean(&last.value) == Ok(false),
                (_, None) => true,
            };
            let logs = key == "BindPaths" || key == "BindReadOnlyPaths";
            let treatment = if logs && values.iter().all(|setting| binds_logs(&setting.value)) {
                Reported
            } else {
                treatment
            };
            match treatment {
                Refused(why) if !nothing => {
                    let at = values.last().copied().unwrap_or(setting);
                    return Err(at.refuse(if why == UNKNOWN {
                        format!("{why}{OWN}")
                    } else {
                        why.to_owned()
                    }));
                }
                Reported if !nothing && seen.insert((section, key)) => reported.push(key),
                _ => {}
            }
        }
        Ok(reported)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    use super::super::syntax::parse;
    use super::*;

    fn settings(text: &str) -> Settings {
        Settings(parse(text, Path::new("/u")).unwrap())
    }

    #[test]
    fn an_empty_value_takes_back_those_before_it() {
        let settings =
            settings("[Service]\nUser=a\nUser=b\nExecStart=x\nExecStart=\nExecStart=y\n[Unit]\nUser=z\n");
        let values = |key| settings.list(key).iter().map(|it| it.value.clone()).collect::<Vec<_>>();
        assert_eq!(
            (values("ExecStart"), values("User")),
            (vec!["y".to_owned()], vec!["a".to_owned(), "b".to_owned()])
        );
        assert_eq!(settings.last("User").unwrap().line, 3);
    }

    #[test]
    fn what_is_left_out_is_told_once_unless_there_is_nothing_to_do() {
        let settings = settings(
            "[Unit]\nDescription=d\nAfter=a\nAfter=b\n[Service]\nPrivateTmp=yes\nPrivateDevices=no\nCapabilityBoundingSet=\n\
             ProtectSystem=strict\nProtectHome=yes\nProtectHome=\nTimeoutStopSec=0\nStandardInput=null\nDynamicUser=no\nSockets=x\nSockets=\n\
             BindReadOnlyPaths=/dev/log:/var/lib/x/dev/log -/run/systemd/journal/socket\n\
             X-Mine=1\n[X-Other]\nA=b\n[Install]\nWantedBy=w\n",
        );
        assert_eq!(
            settings.left_out().unwrap(),
            [
                "After",
                "PrivateTmp",
                "CapabilityBoundingSet",
                "ProtectSystem",
                "TimeoutStopSec",
                "BindReadOnlyPaths"
            ]
        );
    }

    #[test]
    fn what_would_be_missed_is_refused_with_its_place_and_a_way_out() {
        for (text, way) in [
            ("BindPaths=/a", "--file"),
            ("BindPaths=/dev/log /a", "--file"),
            ("StandardInput=tty", "open what it needs itself"),
            ("DynamicUser=yes", "User="),
            ("Delegate=cpu", "drop-in"),
            ("ExecCondition=/bin/x", "ExecStartPre="),
            ("Nonsense=1", "not known here"),
        ] {
            let message = settings(&format!("[Service]\n{text}\n")).left_out().unwrap_err().to_string();
            assert!(message.starts_with(&format!("/u:2: {text}: ")) && message.contains(way), "{message}");
        }
        assert!(settings("[Socket]\nA=b").left_out().is_err());
    }

    /// systemd itself knows what there is.
    #[test]
    fn all_that_systemd_knows_has_its_treatment() {
        let output = ["systemd", "/usr/lib/systemd/systemd", "/lib/systemd/systemd"]
            .iter()
            .find_map(|program| Command::new(program).arg("--dump-configuration-items").output().ok());
        let Some(output) = output.filter(|output| output.status.success()) else {
            orrery_testing::skipped!("systemd is not installed");
            return;
        };
        let (mut section, mut count) = (String::new(), 0);
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            if let Some(name) = line.strip_prefix('[') {
                section = name.trim_end_matches(']').to_owned();
            } else if let Some((key, _)) =
                line.split_once('=').filter(|_| ["Unit", "Service"].contains(&section.as_str()))
            {
                assert!(known(&section, key).is_some(), "{section}: {key}");
                count += 1;
            }
        }
        assert!(count > 200, "only {count} were seen");
    }
}
