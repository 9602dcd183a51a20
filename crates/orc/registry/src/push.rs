//! `orrery orc push`: reads a tree, and sends what the registry does not have.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result, bail};
use orrery_orc_registry::command::Push;
use orrery_orc_registry::digest::Digest;
use orrery_orc_registry::listing::{Content, Listing};
use orrery_orc_registry::manifest::{
    CONTENT, Descriptor, EMPTY, Index, LISTING, MAX_LAYERS, MAX_MANIFEST, Manifest, OCI_INDEX, OCI_MANIFEST,
    PART_ARTIFACT, TREE_ARTIFACT,
};
use orrery_orc_rootfs::{Error, Tree};
use orrery_orc_wire::ObjectId;
use orrery_policy::values::shown_size;
use serde_json::json;

use crate::checked::{digest_of, names_of};
use crate::client::{Client, Pushed, Source};
use crate::parallel::{Progress, each};

/// The bytes of an empty configuration.
const NOTHING: &[u8] = b"{}";

/// Pushes a tree, and prints what was sent.
///
/// # Errors
/// What a user can do something about.
pub(crate) fn run(arguments: &Push, is_verbose: bool) -> Result<()> {
    let reference = &arguments.reference;
    if reference.digest.is_some() {
        bail!("cannot push to a digest: it is computed; name a tag");
    }
    let (listing, files) = read(&arguments.tree)?;
    let bytes = listing.encode().with_context(|| format!("cannot describe {}", arguments.tree.display()))?;
    let plan = Plan::new(&listing, &bytes)?;
    let others: Vec<String> = arguments.mount_from.iter().cloned().collect();
    let client = Client::new(reference, &arguments.connection, true, &others, is_verbose)?;
    let tag = reference.manifest();
    let name = format!("{}/{}", reference.host, reference.repository);
    let failed = || format!("cannot push {} to {name}:{tag}", arguments.tree.display());
    let total: u64 = listing.contents().iter().map(|content| content.size).sum();
    let counts = Counts::default();
    let is_there = client.manifest_digest(&tag).with_context(failed)? == Some(plan.digest);
    if !is_there {
        let progress = Progress::new("pushed", listing.contents().len());
        each(arguments.connection.jobs, listing.contents(), |content| {
            let path = files.get(&content.id).context("a content has no file")?;
            let source = Source::File(path, content.size);
            let pushed = client
                .push_blob(content.digest, source, arguments.mount_from.as_deref())
                .with_context(|| format!("cannot push {}", path.display()))?;
            counts.add(pushed, content.size);
            progress.add(if pushed == Pushed::Sent { content.size } else { 0 });
            Ok(())
        })
        .with_context(failed)?;
        plan.push(&client, &tag, &bytes).with_context(failed)?;
    }
    let [sent, sent_bytes, mounted, present] =
        [&counts.sent, &counts.sent_bytes, &counts.mounted, &counts.present]
            .map(|one| one.load(Ordering::Relaxed));
    if arguments.connection.json {
        let result = json!({
            "schema": 1,
            "reference": format!("{name}:{tag}"),
            "digest": plan.digest,
            "contents": listing.contents().len(),
            "bytes": total,
            "is_new": !is_there,
            "sent": {"contents": sent, "bytes": sent_bytes},
            "mounted": mounted,
            "present": present,
            "requests": client.requests(),
        });
        println!("{result}");
    } else if is_there {
        println!("{name}:{tag}@{}: the registry has it", plan.digest);
    } else {
        println!(
            "{name}:{tag}@{}: {} contents, {}, of which {sent} with {} were sent",
            plan.digest,
            listing.contents().len(),
            shown_size(total),
            shown_size(sent_bytes)
        );
    }
    Ok(())
}

#[derive(Default)]
struct Counts {
    sent: AtomicU64,
    sent_bytes: AtomicU64,
    mounted: AtomicU64,
    present: AtomicU64,
}

impl Counts {
    fn add(&self, pushed: Pushed, bytes: u64) {
        let count = match pushed {
            Pushed::Present => &self.present,
            Pushed::Mounted => &self.mounted,
            Pushed::Sent => {
                self.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
                &self.sent
            }
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Reads a tree: its listing, and a file for each content.
fn read(tree: &Path) -> Result<(Listing, HashMap<ObjectId, PathBuf>)> {
    if !tree.is_dir() {
        bail!("cannot push {}: it is no directory", tree.display());
    }
    let (mut contents, mut files) = (HashMap::new(), HashMap::new());
    let read = Tree::read(tree, |path, found| {
        let failed = |cause| Error::File { operation: "read", path: path.to_owned(), cause };
        // A file that was exchanged for a FIFO would never answer.
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let file =
            File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path).map_err(failed)?;
        let (digest, id, size) = names_of(file).map_err(failed)?;
        if size != found.len() {
            return Err(Error::Changes(path.to_owned()));
        }
        contents.insert(id, Content { digest, id, size });
        files.entry(id).or_insert_with(|| path.to_owned());
        Ok((id, size))
    });
    let listing = Listing::new(read?, &contents);
    Ok((listing.with_context(|| format!("cannot describe {}", tree.display()))?, files))
}

/// The manifests of a tree. One names all contents; where these are too many, an index has one of the tree and others that name them.
struct Plan {
    /// In the order in which they are pushed, with their types; the last one is pushed under the tag.
    manifests: Vec<(&'static str, Vec<u8>)>,
    digest: Digest,
    listing: Digest,
    /// Whether one of them names the empty configuration.
    names_nothing: bool,
}

fn descriptor(media_type: &str, bytes: &[u8]) -> Descriptor {
    Descriptor {
        media_type: media_type.to_owned(),
        digest: digest_of(bytes),
        size: bytes.len() as u64,
        artifact_type: None,
        platform: None,
    }
}

impl Plan {
    fn new(listing: &Listing, bytes: &[u8]) -> Result<Self> {
        let manifest = |artifact_type: &str, config: Descriptor, contents: &[Content]| {
            let layers = contents.iter().map(|content| Descriptor {
                media_type: CONTENT.to_owned(),
                digest: content.digest,
                size: content.size,
                artifact_type: None,
                platform: None,
            });
            let mut layers: Vec<Descriptor> = layers.collect();
            if layers.is_empty() {
                // There has to be one.
                layers.push(descriptor(EMPTY, NOTHING));
            }
            serde_json::to_vec(&Manifest {
                schema_version: 2,
                media_type: Some(OCI_MANIFEST.to_owned()),
                artifact_type: Some(artifact_type.to_owned()),
                config,
                layers,
            })
        };
        let config = descriptor(LISTING, bytes);
        let contents = listing.contents();
        let mut manifests = Vec::new();
        let has_parts = contents.len() > MAX_LAYERS;
        let first = if has_parts { &[][..] } else { contents };
        manifests.push((OCI_MANIFEST, manifest(TREE_ARTIFACT, config.clone(), first)?));
        if has_parts {
            for part in contents.chunks(MAX_LAYERS) {
                manifests.push((OCI_MANIFEST, manifest(PART_ARTIFACT, descriptor(EMPTY, NOTHING), part)?));
            }
            let described = manifests.iter().enumerate().map(|(index, (media_type, bytes))| {
                let kind = if index == 0 { TREE_ARTIFACT } else { PART_ARTIFACT };
                Descriptor { artifact_type: Some(kind.to_owned()), ..descriptor(media_type, bytes) }
            });
            let index = Index {
                schema_version: 2,
                media_type: Some(OCI_INDEX.to_owned()),
                artifact_type: Some(TREE_ARTIFACT.to_owned()),
                manifests: described.collect(),
            };
            manifests.push((OCI_INDEX, serde_json::to_vec(&index)?));
        }
        if let Some((_, long)) = manifests.iter().find(|(_, bytes)| bytes.len() as u64 > MAX_MANIFEST) {
            bail!("cannot push the tree: a manifest would have {} bytes, more than 4 MiB", long.len());
        }
        let digest = manifests.last().map(|(_, bytes)| digest_of(bytes)).context("there is no manifest")?;
        Ok(Self {
            manifests,
            digest,
            listing: config.digest,
            names_nothing: has_parts || contents.is_empty(),
        })
    }

    /// Pushes the listing and the manifests, that under the tag last: it names what is there.
    fn push(&self, client: &Client, tag: &str, listing: &[u8]) -> Result<()> {
        client.push_blob(self.listing, Source::Bytes(listing), None)?;
        if self.names_nothing {
            client.push_blob(digest_of(NOTHING), Source::Bytes(NOTHING), None)?;
        }
        let (last, before) = self.manifests.split_last().context("there is no manifest")?;
        for (media_type, bytes) in before {
            client.put_manifest(&digest_of(bytes).to_string(), media_type, bytes)?;
        }
        client.put_manifest(tag, last.0, &last.1)
    }
}

#[cfg(test)]
mod tests {
    use orrery_orc_rootfs::Attributes;
    use orrery_orc_rootfs::tree::{Entry, Kind};

    use super::*;

    /// A listing with so many contents.
    fn listing(count: usize) -> Listing {
        let attributes = Attributes::default();
        let top = Entry { path: PathBuf::new(), kind: Kind::Directory, attributes: attributes.clone() };
        let (mut entries, mut contents) = (vec![top], HashMap::new());
        for number in 0..count {
            let mut hash = [0; 32];
            hash[..8].copy_from_slice(&number.to_le_bytes());
            let (id, size) = (ObjectId(hash), u64::MAX >> 20);
            contents.insert(id, Content { digest: Digest(hash), id, size });
            let path = format!("{number:06}").into();
            entries.push(Entry {
                path,
                kind: Kind::File { id, length: size },
                attributes: attributes.clone(),
            });
        }
        Listing::new(Tree::new(entries).unwrap(), &contents).unwrap()
    }

    /// Every content is named by a manifest that the registry takes, and each manifest of an index is pushed before it.
    #[test]
    fn manifests_name_all_contents_and_are_not_too_long() {
        for count in [0, 1, MAX_LAYERS, MAX_LAYERS + 1, 3 * MAX_LAYERS] {
            let listing = listing(count);
            let plan = Plan::new(&listing, b"listing").unwrap();
            let (last, before) = plan.manifests.split_last().unwrap();
            let mut named = Vec::new();
            for (media_type, bytes) in &plan.manifests {
                assert!(bytes.len() as u64 <= MAX_MANIFEST, "{count}: {}", bytes.len());
                if *media_type == OCI_MANIFEST {
                    let manifest: Manifest = serde_json::from_slice(bytes).unwrap();
                    let contents = manifest.layers.into_iter().filter(|layer| layer.media_type == CONTENT);
                    named.extend(contents.map(|layer| layer.digest));
                }
            }
            let listed: Vec<Digest> = listing.contents().iter().map(|content| content.digest).collect();
            assert_eq!(named, listed);
            assert_eq!(before.is_empty(), count <= MAX_LAYERS);
            if !before.is_empty() {
                let index: Index = serde_json::from_slice(&last.1).unwrap();
                let digests: Vec<Digest> = index.manifests.iter().map(|one| one.digest).collect();
                assert_eq!(digests, before.iter().map(|(_, bytes)| digest_of(bytes)).collect::<Vec<_>>());
                assert_eq!(index.manifests[0].artifact_type.as_deref(), Some(TREE_ARTIFACT));
            }
            assert_eq!(plan.names_nothing, count == 0 || count > MAX_LAYERS);
        }
    }
}
