//! Signatures by [AWS-LC](https://github.com/aws/aws-lc), for `orrery-vault` (`signer.h`).
//!
//! A signature in a vault costs two changes of the running process. AWS-LC makes most of those that servers of TLS ask for in less
//! time than OpenSSL 3 does, by more than that in many cases. What it does not offer, OpenSSL signs as ever: whoever asks here gets no
//! signature then, and looks further.
//!
//! Like OpenSSL, AWS-LC makes the secret number of an ECDSA signature of random bytes *and* of the key and the digest.

#![warn(missing_docs)]

use core::ffi::{CStr, c_char, c_int, c_void};

use aws_lc_rs::digest::{Algorithm, Digest, MAX_OUTPUT_LEN, SHA256, SHA384, SHA512};
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, ECDSA_P521_SHA512_ASN1_SIGNING,
    EcdsaKeyPair, Ed25519KeyPair, RSA_PKCS1_SHA256, RSA_PKCS1_SHA384, RSA_PKCS1_SHA512, RSA_PSS_SHA256,
    RSA_PSS_SHA384, RSA_PSS_SHA512, RsaEncoding, RsaKeyPair,
};
// The vault's own functions are to be in the same archive.
use orrery as _;

/// The paddings, as OpenSSL numbers them (`RSA_PKCS1_PADDING`, `RSA_PKCS1_PSS_PADDING`).
const PKCS1: c_int = 1;
const PSS: c_int = 6;
/// A salt as long as the digest (`RSA_PSS_SALTLEN_DIGEST`).
const SALT_OF_DIGEST: c_int = -1;

/// A private key.
#[derive(Debug)]
pub enum Signer {
    /// RSA of 2048 to 8192 bits.
    Rsa(RsaKeyPair),
    /// ECDSA over P-256, P-384 or P-521, and the digest that AWS-LC has with the curve.
    Ecdsa(EcdsaKeyPair, &'static Algorithm),
    /// Ed25519, which signs messages.
    Ed25519(Ed25519KeyPair),
}

/// What shall be signed how.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The digest's name, as OpenSSL gives it; empty for none.
    pub digest: &'a str,
    /// OpenSSL's number of the padding; of no meaning but for RSA.
    pub padding: c_int,
    /// How long PSS' salt is, as `EVP_PKEY_CTX_set_rsa_pss_saltlen` takes it.
    pub salt: c_int,
    /// A digest of this kind, or a message.
    pub data: &'a [u8],
}

impl Signer {
    /// Takes a private key in PKCS #8 (RFC 5958), in DER; `None` where it is of no kind that is signed with here.
    #[must_use]
    pub fn new(pkcs8: &[u8]) -> Option<Self> {
        if let Ok(pair) = RsaKeyPair::from_pkcs8(pkcs8) {
            return Some(Self::Rsa(pair));
        }
        let curves = [
            (&ECDSA_P256_SHA256_ASN1_SIGNING, &SHA256),
            (&ECDSA_P384_SHA384_ASN1_SIGNING, &SHA384),
            (&ECDSA_P521_SHA512_ASN1_SIGNING, &SHA512),
        ];
        for (curve, digest) in curves {
            if let Ok(pair) = EcdsaKeyPair::from_pkcs8(curve, pkcs8) {
                return Some(Self::Ecdsa(pair, digest));
            }
        }
        Ed25519KeyPair::from_pkcs8(pkcs8).ok().map(Self::Ed25519)
    }

    /// Signs into `signature`; the signature's length, or `None` where OpenSSL has to, or has to say why it cannot be.
    #[must_use]
    pub fn sign(&self, request: Request<'_>, signature: &mut [u8]) -> Option<usize> {
        match self {
            Self::Rsa(pair) => {
                let digest = digest(request.digest, request.data)?;
                let encoding = encoding(request.padding, request.salt, digest.algorithm())?;
                let signature = signature.get_mut(..pair.public_modulus_len())?;
                pair.sign_digest(encoding, &digest, signature).ok()?;
                Some(signature.len())
            }
            Self::Ecdsa(pair, kind) => {
                let digest = fitted(digest(request.digest, request.data)?, kind)?;
                put(pair.sign_digest(&digest).ok()?.as_ref(), signature)
            }
            Self::Ed25519(pair) if request.digest.is_empty() => {
                put(pair.sign(request.data).as_ref(), signature)
            }
            Self::Ed25519(_) => None,
        }
    }
}

fn put(bytes: &[u8], into: &mut [u8]) -> Option<usize> {
    into.get_mut(..bytes.len())?.copy_from_slice(bytes);
    Some(bytes.len())
}

/// A digest of which the name is given; `None` where that is another one's, or it is not as long as it has to be.
fn digest(name: &str, bytes: &[u8]) -> Option<Digest> {
    const KINDS: [(&str, &str, &Algorithm); 3] =
        [("SHA256", "SHA2-256", &SHA256), ("SHA384", "SHA2-384", &SHA384), ("SHA512", "SHA2-512", &SHA512)];
    let is_called = |one: &str| one.eq_ignore_ascii_case(name);
    let (.., kind) = KINDS.into_iter().find(|(one, other, _)| is_called(one) || is_called(other))?;
    Digest::import_less_safe(bytes, kind).ok()
}

/// Returns the same number in a digest of another length. ECDSA takes a digest for a number, of which it uses as many
/// leading bits as the curve's order has (FIPS 186-5, 6.4.1): a longer one loses its end, a shorter one gets zeros
/// before it. TLS 1.2 signs with any digest over any curve.
fn fitted(digest: Digest, kind: &'static Algorithm) -> Option<Digest> {
    let (bytes, mut number) = (digest.as_ref(), [0; MAX_OUTPUT_LEN]);
    let number = number.get_mut(..kind.output_len)?;
    let length = bytes.len().min(number.len());
    let start = number.len() - length;
    number[start..].copy_from_slice(&bytes[..length]);
    Digest::import_less_safe(number, kind).ok()
}

fn encoding(padding: c_int, salt: c_int, digest: &'static Algorithm) -> Option<&'static dyn RsaEncoding> {
    let fits = salt == SALT_OF_DIGEST || usize::try_from(salt) == Ok(digest.output_len);
    let encodings: [(&Algorithm, &dyn RsaEncoding, &dyn RsaEncoding); 3] = [
        (&SHA256, &RSA_PKCS1_SHA256, &RSA_PSS_SHA256),
        (&SHA384, &RSA_PKCS1_SHA384, &RSA_PSS_SHA384),
        (&SHA512, &RSA_PKCS1_SHA512, &RSA_PSS_SHA512),
    ];
    let (_, pkcs1, pss) = encodings.into_iter().find(|(kind, ..)| *kind == digest)?;
    match padding {
        PKCS1 => Some(pkcs1),
        PSS if fits => Some(pss),
        _ => None,
    }
}

/// A signer of this key, which is in PKCS #8; null where there is none for such keys.
///
/// # Safety
/// `pkcs8` names `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_signer_new(pkcs8: *const c_void, length: usize) -> *mut Signer {
    // SAFETY: the caller's promise.
    let pkcs8 = unsafe { core::slice::from_raw_parts(pkcs8.cast(), length) };
    Signer::new(pkcs8).map_or(core::ptr::null_mut(), |signer| Box::into_raw(Box::new(signer)))
}

/// Forgets the key.
///
/// # Safety
/// `signer` is null or came from [`orrery_signer_new`], and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_signer_free(signer: *mut Signer) {
    if !signer.is_null() {
        // SAFETY: the caller's promise: it was a box, and nobody has it.
        drop(unsafe { Box::from_raw(signer) });
    }
}

/// Signs; the signature's length, or 0 where OpenSSL has to.
///
/// # Safety
/// `signer` came from [`orrery_signer_new`]; `digest` is a string; `data` names `length` bytes, `signature` room for `room`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_signer_sign(
    signer: *const Signer,
    digest: *const c_char,
    padding: c_int,
    salt: c_int,
    data: *const c_void,
    length: usize,
    signature: *mut c_void,
    room: usize,
) -> usize {
    // SAFETY: the caller's promise.
    let (signer, digest, data, signature) = unsafe {
        (
            &*signer,
            CStr::from_ptr(digest),
            core::slice::from_raw_parts(data.cast(), length),
            core::slice::from_raw_parts_mut(signature.cast(), room),
        )
    };
    let Ok(digest) = digest.to_str() else { return 0 };
    signer.sign(Request { digest, padding, salt, data }, signature).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use openssl::ec::{EcGroup, EcKey};
    use openssl::hash::MessageDigest;
    use openssl::md::{Md, MdRef};
    use openssl::nid::Nid;
    use openssl::pkey::{Id, PKey, Private};
    use openssl::pkey_ctx::PkeyCtx;
    use openssl::rsa::{Padding, Rsa};
    use openssl::sign::{RsaPssSaltlen, Verifier};
    use proptest::prelude::*;

    use super::*;

    const RAW: c_int = 3;

    /// A digest by both of its names, and how long it is.
    fn digests() -> [(&'static str, &'static str, usize, &'static MdRef); 3] {
        [
            ("SHA256", "SHA2-256", 32, Md::sha256()),
            ("sha384", "SHA2-384", 48, Md::sha384()),
            ("SHA512", "sha2-512", 64, Md::sha512()),
        ]
    }

    fn rsa(bits: u32) -> PKey<Private> {
        PKey::from_rsa(Rsa::generate(bits).unwrap()).unwrap()
    }

    fn curve(nid: Nid) -> PKey<Private> {
        PKey::from_ec_key(EcKey::generate(&EcGroup::from_curve_name(nid).unwrap()).unwrap()).unwrap()
    }

    fn signer(key: &PKey<Private>) -> Option<Signer> {
        Signer::new(&key.private_key_to_pkcs8().unwrap())
    }

    fn signed(signer: &Signer, digest: &str, padding: c_int, salt: c_int, data: &[u8]) -> Option<Vec<u8>> {
        let mut signature = vec![0; 1024];
        let length = signer.sign(Request { digest, padding, salt, data }, &mut signature)?;
        signature.truncate(length);
        Some(signature)
    }

    /// Returns whether OpenSSL finds that it is a signature; for RSA, with this padding and a salt as long as the
    /// digest.
    fn is_good(
        key: &PKey<Private>,
        padding: Option<Padding>,
        kind: &MdRef,
        digest: &[u8],
        signature: &[u8],
    ) -> bool {
        let mut context = PkeyCtx::new(key).unwrap();
        context.verify_init().unwrap();
        if let Some(padding) = padding {
            context.set_rsa_padding(padding).unwrap();
            if padding == Padding::PKCS1_PSS {
                context.set_rsa_pss_saltlen(RsaPssSaltlen::DIGEST_LENGTH).unwrap();
            }
        }
        context.set_signature_md(kind).unwrap();
        context.verify(digest, signature).unwrap_or(false)
    }

    #[test]
    fn rsa_signs_digests_in_both_paddings() {
        let key = rsa(2048);
        let signer = signer(&key).unwrap();
        for (one, other, length, kind) in digests() {
            let data = vec![7; length];
            for name in [one, other] {
                let pkcs1 = signed(&signer, name, PKCS1, 0, &data).unwrap();
                assert!(is_good(&key, Some(Padding::PKCS1), kind, &data, &pkcs1), "{name}");
                for salt in [SALT_OF_DIGEST, c_int::try_from(length).unwrap()] {
                    let pss = signed(&signer, name, PSS, salt, &data).unwrap();
                    assert!(is_good(&key, Some(Padding::PKCS1_PSS), kind, &data, &pss), "{name}");
                    let other = vec![8; length];
                    assert!(!is_good(&key, Some(Padding::PKCS1_PSS), kind, &other, &pss), "{name}");
                }
            }
        }
    }

    #[test]
    fn what_rsa_does_not_do_is_left_to_openssl() {
        let signer = signer(&rsa(2048)).unwrap();
        let refused = [
            ("SHA256", RAW, 0, 32),
            ("SHA256", PSS, -2, 32),
            ("SHA256", PSS, 20, 32),
            ("SHA256", PKCS1, 0, 31),
            ("SHA256", PKCS1, 0, 0),
            ("SHA1", PKCS1, 0, 20),
            ("MD5-SHA1", PKCS1, 0, 36),
            ("", PKCS1, 0, 32),
        ];
        for (digest, padding, salt, length) in refused {
            let data = vec![7; length];
            assert_eq!(
                signed(&signer, digest, padding, salt, &data),
                None,
                "{digest} {padding} {salt} {length}"
            );
        }
        let request = Request { digest: "SHA256", padding: PKCS1, salt: 0, data: &[7; 32] };
        assert_eq!(signer.sign(request, &mut [0; 255]), None, "no room");
        assert_eq!(signer.sign(request, &mut [0; 256]), Some(256));
    }

    #[test]
    fn each_curve_signs_digests_of_every_kind() {
        for nid in [Nid::X9_62_PRIME256V1, Nid::SECP384R1, Nid::SECP521R1] {
            let key = curve(nid);
            let signer = signer(&key).unwrap();
            for (one, other, length, kind) in digests() {
                let data: Vec<u8> = (0..length).map(|at| u8::try_from(at * 3 + 1).unwrap()).collect();
                for name in [one, other] {
                    let signature = signed(&signer, name, 0, 0, &data).unwrap();
                    assert!(is_good(&key, None, kind, &data, &signature), "{nid:?} {name}");
                    // P-256 uses half of SHA-512.
                    for at in [0, length / 2 - 1] {
                        let mut changed = data.clone();
                        changed[at] ^= 1;
                        assert!(!is_good(&key, None, kind, &changed, &signature), "{nid:?} {name}");
                    }
                }
                assert_eq!(signed(&signer, one, 0, 0, &data[1..]), None, "{nid:?} {one}");
                assert_ne!(
                    signed(&signer, one, 0, 0, &data),
                    signed(&signer, one, 0, 0, &data),
                    "secret numbers"
                );
                let request = Request { digest: one, padding: 0, salt: 0, data: &data };
                assert_eq!(signer.sign(request, &mut [0; 8]), None, "no room");
            }
            assert_eq!(signed(&signer, "SHA1", 0, 0, &[7; 20]), None);
            assert_eq!(signed(&signer, "", 0, 0, &[7; 32]), None);
        }
    }

    #[test]
    fn ed25519_signs_messages() {
        let key = PKey::generate_ed25519().unwrap();
        let signer = signer(&key).unwrap();
        for length in [0, 1, 5000] {
            let message = vec![7; length];
            let signature = signed(&signer, "", 0, 0, &message).unwrap();
            let mut verifier = Verifier::new_without_digest(&key).unwrap();
            assert!(verifier.verify_oneshot(&signature, &message).unwrap());
        }
        assert_eq!(signed(&signer, "SHA256", 0, 0, &[7; 32]), None);
        assert_eq!(signer.sign(Request { digest: "", padding: 0, salt: 0, data: b"" }, &mut [0; 63]), None);
    }

    #[test]
    fn other_keys_are_openssls() {
        let mut pss = PkeyCtx::new_id(Id::RSA_PSS).unwrap();
        pss.keygen_init().unwrap();
        pss.set_rsa_keygen_bits(2048).unwrap();
        assert!(signer(&pss.keygen().unwrap()).is_none());
        assert!(signer(&rsa(1024)).is_none());
        assert!(signer(&curve(Nid::SECP224R1)).is_none());
        assert!(signer(&curve(Nid::BRAINPOOL_P256R1)).is_none());
        assert!(signer(&PKey::generate_ed448().unwrap()).is_none());
        assert!(signer(&PKey::generate_x25519().unwrap()).is_none());
    }

    /// A forked twin must not draw the numbers that its parent draws: with two signatures of one secret number anybody finds the key.
    #[test]
    fn a_copy_of_the_process_has_secret_numbers_of_its_own() {
        use std::io::Read as _;
        let signer = signer(&curve(Nid::X9_62_PRIME256V1)).unwrap();
        let sign = || signed(&signer, "SHA256", 0, 0, &[7; 32]).unwrap();
        sign();
        let (mut reading, writing) = std::io::pipe().unwrap();
        // SAFETY: the child allocates and signs, as a twin does; if another thread of this test had a lock, it would hang, and be ended
        // with it.
        let child = unsafe { libc::fork() };
        if child == 0 {
            use std::io::Write as _;
            let _ = (&writing).write_all(&sign());
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(0) };
        }
        drop(writing);
        let own = sign();
        let mut copys = Vec::new();
        reading.read_to_end(&mut copys).unwrap();
        // SAFETY: our own child.
        unsafe { libc::waitpid(child, core::ptr::null_mut(), 0) };
        let half = |signature: &[u8]| {
            let signature = openssl::ecdsa::EcdsaSig::from_der(signature).unwrap();
            signature.r().to_owned().unwrap()
        };
        assert_ne!(half(&own), half(&copys));
    }

    #[test]
    fn c_is_answered() {
        let key = curve(Nid::X9_62_PRIME256V1);
        let (pkcs8, data, mut room) = (key.private_key_to_pkcs8().unwrap(), [7_u8; 32], [0_u8; 128]);
        // SAFETY: lengths are those of what they go with, the signer is freed once and last.
        let (none, signed, refused) = unsafe {
            let none = orrery_signer_new(pkcs8.as_ptr().cast(), 10);
            let signer = orrery_signer_new(pkcs8.as_ptr().cast(), pkcs8.len());
            let mut sign = |name: &CStr| {
                let (data, room) = (data.as_ptr().cast(), room.as_mut_ptr().cast());
                orrery_signer_sign(signer, name.as_ptr(), 0, 0, data, 32, room, 128)
            };
            let outcome = (none, sign(c"SHA256"), sign(c"SHA\xff256"));
            orrery_signer_free(signer);
            orrery_signer_free(core::ptr::null_mut());
            outcome
        };
        assert!(none.is_null() && refused == 0);
        assert!(is_good(&key, None, Md::sha256(), &data, &room[..signed]));
    }

    proptest! {
        #[test]
        fn what_is_no_key_is_none(bytes in proptest::collection::vec(any::<u8>(), 0..300), cut in any::<usize>()) {
            prop_assert!(Signer::new(&bytes).is_none());
            let whole = PKey::generate_ed25519().unwrap().private_key_to_pkcs8().unwrap();
            prop_assert!(Signer::new(&whole[..cut % whole.len()]).is_none());
        }
    }

    #[test]
    fn digests_have_the_lengths_that_the_tests_take_them_to_have() {
        for (_, name, length, _) in digests() {
            assert_eq!(MessageDigest::from_name(name).map(|digest| digest.size()), Some(length));
        }
    }
}
