//! Manifests: what a registry has under a tag (OCI image specification 1.1, and Docker's, whose fields are the same).

use serde::{Deserialize, Serialize};

use crate::digest::Digest;

/// Bytes of the largest manifest that is read or written, which is what registries take.
pub const MAX_MANIFEST: u64 = 4 << 20;

/// The number of contents that one manifest names: each takes some 160 bytes.
pub const MAX_LAYERS: usize = 20_000;

/// The media type of OCI manifests.
pub const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// The media type of OCI indexes.
pub const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// The media types that a registry may answer with.
pub const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json, \
     application/vnd.docker.distribution.manifest.v2+json, application/vnd.docker.distribution.manifest.list.v2+json";

/// The type of artifacts that are trees.
pub const TREE_ARTIFACT: &str = "application/vnd.orrery.tree.v1";

/// The type of artifacts that name further contents of a tree, so that the registry keeps and copies them.
pub const PART_ARTIFACT: &str = "application/vnd.orrery.tree.part.v1";

/// The media type of listings.
pub const LISTING: &str = "application/vnd.orrery.tree.v1+json";

/// The media type of the bytes of files.
pub const CONTENT: &str = "application/vnd.orrery.content.v1";

/// The media type of an empty configuration, which is `{}`.
pub const EMPTY: &str = "application/vnd.oci.empty.v1+json";

/// A blob or a manifest that another one names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is.
    pub media_type: String,
    /// The hash of its bytes.
    pub digest: Digest,
    /// The number of its bytes.
    pub size: u64,
    /// The type of an artifact's manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The machine that an image of an index is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
}

/// A kind of machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// The operating system, as Go names it.
    pub os: String,
    /// The architecture, as Go names it.
    pub architecture: String,
    /// The variant of the architecture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

/// An image's or an artifact's manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// 2.
    pub schema_version: u32,
    /// What it is; older ones do not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// The type of an artifact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The configuration, which is a tree's listing.
    pub config: Descriptor,
    /// Layers of images, contents of trees.
    pub layers: Vec<Descriptor>,
}

/// Manifests under one name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// 2.
    pub schema_version: u32,
    /// What it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    /// The type of an artifact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The manifests.
    pub manifests: Vec<Descriptor>,
}

/// What stands under a tag or a digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Document {
    /// One image or artifact.
    Manifest(Manifest),
    /// Several.
    Index(Index),
}

/// Bytes are no manifest.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// They are no JSON, or lack fields.
    #[error("it is no OCI or Docker manifest: {0}")]
    Json(#[from] serde_json::Error),
    /// They have the fields of both kinds, so that two readers might understand two things.
    #[error("it has both layers and manifests")]
    Both,
    /// They are of another version.
    #[error("it has the schema version {0}, not 2")]
    Version(u32),
}

impl Document {
    /// Reads a manifest or an index.
    ///
    /// # Errors
    /// [`ParseError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, ParseError> {
        #[derive(Deserialize)]
        struct Shape {
            manifests: Option<serde::de::IgnoredAny>,
            layers: Option<serde::de::IgnoredAny>,
        }
        let shape: Shape = serde_json::from_slice(bytes)?;
        if shape.manifests.is_some() && shape.layers.is_some() {
            return Err(ParseError::Both);
        }
        let (document, version) = if shape.manifests.is_some() {
            let index: Index = serde_json::from_slice(bytes)?;
            let version = index.schema_version;
            (Self::Index(index), version)
        } else {
            let manifest: Manifest = serde_json::from_slice(bytes)?;
            let version = manifest.schema_version;
            (Self::Manifest(manifest), version)
        };
        if version == 2 { Ok(document) } else { Err(ParseError::Version(version)) }
    }
}

impl Index {
    /// Returns the manifest of a tree, else that of an image for a platform: the first that fits.
    pub fn choose(&self, platform: &Platform) -> Option<&Descriptor> {
        let is_tree = |one: &&Descriptor| one.artifact_type.as_deref() == Some(TREE_ARTIFACT);
        let fits = |one: &&Descriptor| {
            one.platform.as_ref().is_some_and(|found| {
                found.os == platform.os
                    && found.architecture == platform.architecture
                    && (platform.variant.is_none() || platform.variant == found.variant)
            })
        };
        self.manifests.iter().find(is_tree).or_else(|| self.manifests.iter().find(fits))
    }
}

impl Platform {
    /// Returns that of this machine.
    pub fn here() -> Self {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        Self { os: "linux".to_owned(), architecture: architecture.to_owned(), variant: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_and_indexes_are_told_apart() {
        let descriptor = |size: u64| {
            format!(r#"{{"mediaType":"a/b","digest":"sha256:{}","size":{size}}}"#, "ab".repeat(32))
        };
        let manifest =
            format!(r#"{{"schemaVersion":2,"config":{},"layers":[{}]}}"#, descriptor(2), descriptor(3));
        assert!(
            matches!(Document::parse(manifest.as_bytes()), Ok(Document::Manifest(read)) if read.layers[0].size == 3)
        );
        let index = format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, descriptor(2));
        assert!(matches!(Document::parse(index.as_bytes()), Ok(Document::Index(_))));
        let both = manifest.replace("\"layers\"", "\"manifests\":[],\"layers\"");
        assert!(matches!(Document::parse(both.as_bytes()), Err(ParseError::Both)));
        let other = manifest.replace("n\":2", "n\":1");
        assert!(matches!(Document::parse(other.as_bytes()), Err(ParseError::Version(1))));
        let negative = manifest.replace(":3}", ":-3}");
        assert!(matches!(Document::parse(negative.as_bytes()), Err(ParseError::Json(_))));
    }

    #[test]
    fn an_image_of_this_machine_is_chosen() {
        let of = |architecture: &str| Descriptor {
            media_type: OCI_MANIFEST.to_owned(),
            digest: Digest([architecture.as_bytes()[0]; 32]),
            size: 1,
            artifact_type: None,
            platform: Some(Platform { architecture: architecture.to_owned(), ..Platform::here() }),
        };
        let here = Platform::here();
        let mut index = Index {
            schema_version: 2,
            media_type: None,
            artifact_type: None,
            manifests: vec![of("unheard"), of(&here.architecture)],
        };
        assert_eq!(index.choose(&here), Some(&index.manifests[1]));
        index.manifests.pop();
        assert_eq!(index.choose(&here), None);
    }
}
