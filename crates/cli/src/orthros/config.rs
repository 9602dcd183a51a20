//! A pair described in a file, as `orrery orthros up --config` takes it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use orrery_orthros_host::{
    BridgeConfig, DiskConfig, DiskSource, NetworkConfig, Service, ServiceExit, UnitService, read_unit,
};
use serde::Deserialize;

/// What the file says.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PairFile {
    /// The program and its arguments.
    #[serde(default)]
    service: Vec<String>,
    /// A systemd unit instead.
    unit: Option<String>,
    /// Memory of each machine in MiB.
    #[serde(default = "PairFile::memory")]
    memory: u64,
    /// Processors of each machine.
    #[serde(default = "PairFile::cpus")]
    cpus: u32,
    /// How long one of them may be silent, in seconds.
    #[serde(default = "PairFile::silence")]
    silence: f64,
    /// The network to make.
    network: Option<String>,
    /// A bridge of the host's instead.
    bridge: Option<String>,
    /// The service's address there, with the bits of its network.
    address: Option<String>,
    /// Who knows the way from there.
    gateway: Option<String>,
    /// Where consoles, sockets and a new disk lie.
    directory: Option<PathBuf>,
    disk: Option<DiskTable>,
    /// What to do when the service has exited.
    #[serde(default)]
    restart: Restart,
    /// More programs of this host that the service runs.
    #[serde(default)]
    programs: Vec<String>,
    /// Files of this host that the service needs, and where it expects them.
    #[serde(default)]
    files: Vec<FileTable>,
    /// More for the command line of the guests' kernel.
    #[serde(default)]
    append: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DiskTable {
    size: Option<String>,
    image: Option<PathBuf>,
    #[serde(default = "DiskTable::mount")]
    mount: String,
    content: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileTable {
    here: PathBuf,
    there: String,
}

impl DiskTable {
    fn mount() -> String {
        "/data".to_owned()
    }
}

/// A pair as it is wanted, from the command line or from a file.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) service: Service,
    /// What its unit was made into.
    pub(super) report: Vec<String>,
    pub(super) memory_mib: u64,
    pub(super) cpus: u32,
    pub(super) silence: Duration,
    pub(super) network: Option<NetworkConfig>,
    pub(super) directory: Option<PathBuf>,
    pub(super) disk: Option<DiskConfig>,
    pub(super) append: String,
    pub(super) restart: Restart,
}

/// When a service that has exited is started again, in the words of systemd.service(5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Restart {
    /// Never: the pair ends with the service
    #[default]
    No,
    /// When it failed: it was killed, or exited with a status other than 0
    OnFailure,
    /// Always
    Always,
}

impl Restart {
    /// Returns whether a service that has exited in this way is started again.
    pub(super) fn applies(self, exit: &ServiceExit) -> bool {
        match self {
            Self::No => false,
            Self::OnFailure => exit.status != Some(0),
            Self::Always => true,
        }
    }
}

/// A service as it is named: by a unit, or else by a program with its arguments.
pub(super) struct Named<'n> {
    pub(super) unit: Option<&'n str>,
    pub(super) argv: Vec<String>,
}

impl Named<'_> {
    /// The service with these programs and files besides, and what there is to tell of it.
    pub(super) fn service(
        self,
        disk: Option<&DiskConfig>,
        programs: Vec<String>,
        files: Vec<(PathBuf, String)>,
    ) -> Result<(Service, Vec<String>)> {
        let Some(unit) = self.unit else {
            return Ok((Service { argv: self.argv, programs, files, ..Service::default() }, Vec::new()));
        };
        let UnitService { mut service, report } = read_unit(unit, disk.map(|disk| Path::new(&disk.mount)))?;
        service.programs.extend(programs);
        service.files.extend(files);
        Ok((service, report))
    }
}

/// What a pair has one of, as a failover carries one over, and what to do with several.
pub(super) const DISKS: (&str, &str) =
    ("disk", "put what the service needs on one, in directories of it, or run a pair for each");
pub(super) const NETWORKS: (&str, &str) = (
    "network",
    "give the service one, and let the host forward to it from the others, or run a pair for each",
);

/// The one that is given, if one is.
pub(super) fn one<T: std::fmt::Display>((what, way): (&str, &str), mut given: Vec<T>) -> Result<Option<T>> {
    if given.len() > 1 {
        let named: Vec<String> = given.iter().map(T::to_string).collect();
        bail!(
            "{} {what}s are given ({}), and a pair has one, with which it can be carried over; {way}",
            given.len(),
            named.join(", ")
        );
    }
    Ok(given.pop())
}

impl PairFile {
    fn memory() -> u64 {
        256
    }

    fn cpus() -> u32 {
        1
    }

    fn silence() -> f64 {
        super::SILENCE
    }

    /// Reads a file.
    pub(super) fn read(path: &Path) -> Result<Wanted> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("{} describes no pair", path.display()))
    }

    fn parse(text: &str) -> Result<Wanted> {
        if let Ok(table) = text.parse::<toml::Table>() {
            for (key, kind) in
                [("disk", DISKS), ("network", NETWORKS), ("bridge", NETWORKS), ("address", NETWORKS)]
            {
                if let Some(toml::Value::Array(given)) = table.get(key) {
                    one(
                        kind,
                        given.iter().map(|value| value.to_string().trim().replace('\n', " ")).collect(),
                    )
                    .with_context(|| key.to_owned())?;
                }
            }
        }
        let file: Self = toml::from_str(text)?;
        ensure!(file.unit.is_none() || file.service.is_empty(), "say either service or unit");
        ensure!(
            file.unit.is_some() || !file.service.is_empty(),
            "service: name a program, as in service = [\"redis-server\"], or a unit, as in unit = \"redis-server\""
        );
        let memory_mib = super::power_of_two(&file.memory.to_string())
            .map_err(|why| anyhow::anyhow!("memory = {}: {why}", file.memory))?;
        ensure!((1..=64).contains(&file.cpus), "cpus = {}: a machine has from 1 to 64", file.cpus);
        let silence = super::silence(&file.silence.to_string())
            .map_err(|why| anyhow::anyhow!("silence = {}: {why}", file.silence))?;
        let silence = Duration::from_secs_f64(silence);
        let network = match (file.network, file.bridge, file.address) {
            (Some(_), Some(_), _) => bail!("say either network or bridge"),
            (None, Some(bridge), Some(address)) => {
                let place = BridgeConfig::parse(&bridge, &address, file.gateway.as_deref());
                Some(NetworkConfig::Bridge(place.map_err(anyhow::Error::msg)?))
            }
            (None, Some(_), None) => bail!("bridge: say address, too, as in address = \"192.168.1.7/24\""),
            (_, None, Some(_)) => bail!("address: it takes a bridge"),
            (network, None, None) => {
                ensure!(file.gateway.is_none(), "gateway: it takes a bridge");
                network.map(NetworkConfig::Own)
            }
        };
        let disk = file.disk.map(DiskTable::check).transpose().context("disk")?;
        let files = file.files.into_iter().map(|file| (file.here, file.there)).collect();
        let named = Named { unit: file.unit.as_deref(), argv: file.service };
        let (service, report) = named.service(disk.as_ref(), file.programs, files)?;
        Ok(Wanted {
            service,
            report,
            memory_mib,
            cpus: file.cpus,
            silence,
            network,
            directory: file.directory,
            disk,
            append: file.append,
            restart: file.restart,
        })
    }
}

impl DiskTable {
    fn check(self) -> Result<DiskConfig> {
        let source = match (self.size, self.image) {
            (Some(size), None) => match DiskSource::parse(&size).map_err(anyhow::Error::msg)? {
                source @ DiskSource::New(_) => source,
                DiskSource::Image(_) => bail!("size = {size:?}: write a number and M or G, as in \"64M\""),
            },
            (None, Some(image)) => DiskSource::Image(image),
            _ => bail!("say either size or image"),
        };
        Ok(DiskConfig { source, mount: self.mount, content: self.content })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_pair_is_described() {
        let wanted = PairFile::parse(
            r#"
            service = ["redis-server", "--dir", "/data"]
            memory = 512
            network = "service"
            directory = "/var/lib/pair"

            [disk]
            size = "64M"
            mount = "/var/lib/redis"

            [[files]]
            here = "redis.conf"
            there = "/etc/redis.conf"
            "#,
        )
        .unwrap();
        assert_eq!(wanted.memory_mib, 512);
        assert_eq!(wanted.network, Some(NetworkConfig::Own("service".to_owned())));
        let disk = wanted.disk.unwrap();
        assert_eq!((disk.source, disk.mount.as_str()), (DiskSource::New(64 << 20), "/var/lib/redis"));
        assert_eq!(wanted.service.argv.len(), 3);
        assert_eq!(wanted.service.files, [(PathBuf::from("redis.conf"), "/etc/redis.conf".to_owned())]);
    }

    #[test]
    fn what_is_missing_is_as_on_the_command_line() {
        let wanted = PairFile::parse("service = ['x']").unwrap();
        assert_eq!(wanted.memory_mib, 256);
        assert!(wanted.network.is_none() && wanted.disk.is_none() && wanted.directory.is_none());
    }

    #[test]
    fn a_bridge_is_told_from_a_network_of_its_own() {
        let text = "service = ['x']\nbridge = 'br0'\naddress = '192.168.1.7/24'\ngateway = '192.168.1.1'";
        let place = BridgeConfig::parse("br0", "192.168.1.7/24", Some("192.168.1.1")).unwrap();
        assert_eq!(PairFile::parse(text).unwrap().network, Some(NetworkConfig::Bridge(place)));
        let refused =
            |text: &str| format!("{:#}", PairFile::parse(&format!("service = ['x']\n{text}")).unwrap_err());
        assert!(refused("bridge = 'br0'").contains("address ="));
        assert!(refused("bridge = 'br0'\naddress = '192.168.1.7'").contains("192.168.1.7/24"));
        assert!(refused("bridge = 'br0'\nnetwork = 'n'").contains("either network or bridge"));
        assert!(refused("address = '192.168.1.7/24'").contains("takes a bridge"));
        assert!(refused("gateway = '192.168.1.1'").contains("takes a bridge"));
    }

    #[test]
    fn mistakes_are_told_with_their_place() {
        let refused = |text: &str| format!("{:#}", PairFile::parse(text).unwrap_err());
        assert!(refused("").contains("service"));
        assert!(refused("service = []").contains("name a program"));
        assert!(refused("service = ['x']\nmemory = 300").contains("256, 512"));
        assert!(refused("service = ['x']\ncpus = 0").contains("from 1 to 64"));
        assert!(refused("service = ['x']\nsilence = 0.1").contains("0.5 to 3600"));
        let report = refused("service = ['x']\nmemroy = 256");
        assert!(report.contains("memroy") && report.contains("line 2"), "{report}");
        let report =
            refused("service = ['x']\n[[disk]]\nsize = '64M'\n[[disk]]\nimage = '/srv/b'\nmount = '/b'");
        assert!(
            report.contains("2 disks are given")
                && report.contains("/srv/b")
                && report.contains("directories"),
            "{report}"
        );
        assert!(refused("service = ['x']\nunit = 'y'").contains("either service or unit"));
        assert!(refused("memory = 256").contains("unit = \"redis-server\""));
        assert!(refused("unit = 'no-such-unit'").contains("no-such-unit.service"));
        let report = refused("service = ['x']\nnetwork = ['inner', 'outer']");
        assert!(report.contains("2 networks are given") && report.contains("outer"), "{report}");
        assert!(report.contains("forward"), "{report}");
        assert!(
            refused("service = ['x']\nbridge = ['br0', 'br1']\naddress = '192.168.1.7/24'").contains("br1")
        );
        assert!(refused("service = ['x']\n[disk]\n").contains("either size or image"));
        assert!(refused("service = ['x']\n[disk]\nsize = '1M'").contains("8M"));
        assert!(refused("service = ['x']\n[disk]\nsize = 'big'").contains("64M"));
        assert!(refused("service = ['x']\n[disk]\nsize = '64M'\nimage = 'y'").contains("either"));
        assert!(refused("service = ['x']\n[[files]]\nhere = 'y'").contains("there"));
    }
}
