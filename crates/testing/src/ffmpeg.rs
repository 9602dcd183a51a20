//! ffmpeg, built from Debian's sources, plainly and with the compiler pass of `passes/cls`.
//!
//! It has the codecs, formats and filters of which its own tests (FATE) need no samples, without external libraries. With the pass, each of
//! its programs is linked as a shared library, whose `main` can be called in instances: nothing of the sources is changed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::build::{root, target_directory};
use crate::cls;

/// How it is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    /// By clang, as programs.
    Plain,
    /// By `orrery-cc`, each program as a shared library.
    Instances,
}

/// Codecs of which FATE encodes generated material and decodes the outcome.
const CODECS: &str = "mpeg4,mpeg2video,mpeg1video,ffv1,huffyuv,ffvhuff,rawvideo,mjpeg,h263,h263p,msmpeg4v2,\
                      msmpeg4v3,wmv1,wmv2,flv,snow,pgm,pgmyuv,wrapped_avframe,amv,asv1,asv2,cljr,dnxhd,\
                      dvvideo,h261,jpeg2000,jpegls,msvideo1,prores,qtrle,r210,roq,rv10,rv20,svq1,v210,v308,\
                      v408,y41p,yuv4,avui,gif,bmp,dpx,pam,pbm,pcx,pfm,ppm,qoi,sgi,sunrast,targa,xbm,xwd,\
                      ac3_fixed,alac,flac,mp2,roq_dpcm,s302m,tta,wavpack,pcm_alaw,pcm_mulaw,pcm_f32be,\
                      pcm_f32le,pcm_f64be,pcm_f64le,pcm_s16be,pcm_s16be_planar,pcm_s16le,pcm_s16le_planar,\
                      pcm_s24be,pcm_s24le,pcm_s24le_planar,pcm_s32be,pcm_s32le,pcm_s32le_planar,pcm_s8,\
                      pcm_s8_planar,pcm_u16be,pcm_u16le,pcm_u24be,pcm_u24le,pcm_u32be,pcm_u32le,pcm_u8,\
                      adpcm_adx,adpcm_argo,adpcm_ima_alp,adpcm_ima_apm,adpcm_ima_qt,adpcm_ima_ssi,\
                      adpcm_ima_wav,adpcm_ima_ws,adpcm_ms,adpcm_swf,adpcm_yamaha";
/// Encoders without a decoder of that name.
const ENCODERS: &str = "ljpeg,vc2,mp2fixed";
/// Decoders without an encoder of that name.
const DECODERS: &str = "dirac,mp3,ac3";
const MUXERS: &str = "avi,mov,mp4,nut,rawvideo,framecrc,framemd5,framehash,crc,md5,hash,null,image2,\
                      image2pipe,wav,flv,mpeg2video,yuv4mpegpipe,adx,aiff,alp,amv,apm,argo_asf,asf,ast,au,\
                      caf,dnxhd,dv,filmstrip,flac,gif,gxf,ircam,ismv,kvag,matroska,matroska_audio,mp2,\
                      mpeg1system,mpeg1video,mpegts,mxf,mxf_d10,mxf_opatom,ogg,rm,roq,rso,smjpeg,sox,swf,\
                      tta,voc,w64,wsaud,wv,ffmetadata,pcm_alaw,pcm_mulaw,pcm_f32be,pcm_f32le,pcm_f64be,\
                      pcm_f64le,pcm_s16be,pcm_s16le,pcm_s24be,pcm_s24le,pcm_s32be,pcm_s32le,pcm_s8,\
                      pcm_u16be,pcm_u16le,pcm_u24be,pcm_u24le,pcm_u32be,pcm_u32le,pcm_u8";
const DEMUXERS: &str = "avi,mov,nut,rawvideo,image2,image2pipe,wav,flv,mpegvideo,yuv4mpegpipe,adx,aiff,alp,\
                      apm,argo_asf,asf,ast,au,caf,dnxhd,dv,ffmetadata,filmstrip,flac,gif,gxf,ircam,kvag,\
                      matroska,mp3,mpegps,mpegts,mxf,ogg,rm,roq,rso,smjpeg,sox,swf,tta,voc,w64,wsaud,wv,\
                      pcm_alaw,pcm_mulaw,pcm_f32be,pcm_f32le,pcm_f64be,pcm_f64le,pcm_s16be,pcm_s16le,\
                      pcm_s24be,pcm_s24le,pcm_s32be,pcm_s32le,pcm_s8,pcm_u16be,pcm_u16le,pcm_u24be,\
                      pcm_u24le,pcm_u32be,pcm_u32le,pcm_u8";
const PARSERS: &str = "mpeg4video,mpegvideo,mpegaudio,mjpeg,h261,h263,ac3,dirac,dnxhd,flac,gif";
const FILTERS: &str = "acrossfade,adelay,aecho,aemphasis,aeval,aevalsrc,afade,aformat,allrgb,allyuv,\
                      alphaextract,alphamerge,amerge,amix,anequalizer,anull,apad,aperms,aphasemeter,\
                      aresample,asetnsamples,asetrate,atrim,avgblur,channelmap,channelsplit,chorus,\
                      chromashift,codecview,color,colorbalance,colorchannelmixer,colorkey,colorlevels,\
                      compand,concat,crop,crystalizer,curves,dcshift,decimate,drawbox,earwax,ebur128,\
                      edgedetect,epx,extrastereo,fieldmatch,fieldorder,firequalizer,format,fps,framerate,\
                      freezedetect,gradfun,hflip,hqx,hue,idet,il,interlace,join,kerndeint,life,lut,lutrgb,\
                      lutyuv,metadata,minterpolate,negate,null,nullsink,overlay,pad,pal100bars,pal75bars,\
                      palettegen,paletteuse,pan,perms,phase,pixdesctest,psnr,qp,readvitc,removegrain,\
                      rgbtestsrc,rotate,scale,scale2ref,scdet,select,setpts,settb,showpalette,shuffleplanes,\
                      signalstats,silencedetect,silenceremove,sine,smptebars,smptehdbars,split,sr,ssim,\
                      stereotools,swapuv,telecine,testsrc,testsrc2,thumbnail,tpad,transpose,tremolo,trim,\
                      unsharp,untile,vectorscope,vflip,volume,w3fdif,xbr,yadif,yuvtestsrc";

/// Tables that libavutil's FFT fills once with constants, which its assembly names: all instances share them.
const SHARED: &str = "ff_tx_tab_8_float:ff_tx_tab_16_float:ff_tx_tab_32_float:ff_tx_tab_64_float:ff_tx_tab_128_float:\
                      ff_tx_tab_256_float:ff_tx_tab_512_float:ff_tx_tab_1024_float:ff_tx_tab_2048_float:ff_tx_tab_4096_float:\
                      ff_tx_tab_8192_float:ff_tx_tab_16384_float:ff_tx_tab_32768_float:ff_tx_tab_65536_float:\
                      ff_tx_tab_131072_float:ff_tx_tab_53_float:ff_tx_tab_7_float:ff_tx_tab_9_float";

/// Returns where sources and builds are, which tests and benchmarks share.
fn base() -> PathBuf {
    let target = target_directory();
    target.parent().unwrap_or(&target).join("libraries")
}

/// Returns the directory of the sources, when [`build`] has fetched them.
#[must_use]
pub fn sources() -> PathBuf {
    base().join("ffmpeg")
}

/// Returns the directory in which a build goes on or is ready.
#[must_use]
pub fn directory(build: Build) -> PathBuf {
    base().join(match build {
        Build::Plain => "ffmpeg-plain",
        Build::Instances => "ffmpeg-instances",
    })
}

/// Returns whether [`build`] has built it before.
#[must_use]
pub fn is_built(build: Build) -> bool {
    directory(build).join("built").exists()
}

/// Fetches the sources, and builds the libraries and the program `ffmpeg`, unless that was done; returns the directory of the build. Says
/// what is missing where it cannot be built.
///
/// # Panics
/// If the sources cannot be fetched, or the build fails.
#[must_use]
pub fn build(build: Build) -> Option<PathBuf> {
    let pass = cls::pass()?;
    if ["apt-get", "nasm", "make"].iter().any(|tool| !crate::is_there(tool)) {
        return None;
    }
    run(Command::new(root().join("scripts/debian-source")).arg(base()).arg("ffmpeg"));
    let directory = directory(build);
    let _alone = cls::lock(&directory);
    let clang = format!("clang-{}", cls::version()?);
    let mut configure = Command::new(sources().join("configure"));
    configure.args([
        "--disable-everything",
        "--disable-autodetect",
        "--disable-doc",
        "--disable-debug",
        "--disable-network",
    ]);
    configure.args([
        "--disable-ffplay",
        "--disable-ffprobe",
        "--enable-pic",
        "--enable-hardcoded-tables",
        "--optflags=-O2",
    ]);
    for (kind, names) in [
        ("encoder", CODECS),
        ("decoder", CODECS),
        ("encoder", ENCODERS),
        ("decoder", DECODERS),
        ("muxer", MUXERS),
        ("demuxer", DEMUXERS),
        ("parser", PARSERS),
        ("filter", FILTERS),
        ("protocol", "file,pipe"),
        ("indev", "lavfi"),
    ] {
        configure.arg(format!("--enable-{kind}={names}"));
    }
    if build == Build::Instances {
        configure.arg("--extra-ldexeflags=-shared -Wl,-z,defs -Wl,-Bsymbolic");
        // What it has linked cannot be executed.
        configure.args(["--enable-cross-compile", "--arch=x86_64", "--target-os=linux"]);
    }
    let line = format!("{configure:?}");
    configure.arg(match build {
        Build::Instances => format!("--cc={}", pass.join("bin/orrery-cc").display()),
        Build::Plain => format!("--cc={clang}"),
    });
    let stamp = directory.join("built");
    let age = |path: &Path| fs::metadata(path).and_then(|file| file.modified()).ok();
    let parts =
        fs::read_dir(pass.join("lib")).into_iter().flatten().flatten().map(|entry| age(&entry.path()));
    let newest = if build == Build::Instances { parts.max().flatten() } else { None };
    if fs::read_to_string(&stamp).ok().as_ref() != Some(&line) || age(&stamp) < newest {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.is_dir() {
                let _ = fs::remove_dir_all(path);
            } else if !path.ends_with("lock") {
                let _ = fs::remove_file(path);
            }
        }
        run(environment(&mut configure, &pass, &clang).current_dir(&directory));
        let mut make = make(build)?;
        run(make.arg("all"));
        fs::write(&stamp, line).unwrap_or_else(|error| panic!("cannot write {}: {error}", stamp.display()));
    }
    Some(directory)
}

/// Returns the command `make` in the directory of a build, with what its compiler needs; none where there is no pass.
#[must_use]
pub fn make(build: Build) -> Option<Command> {
    let pass = cls::pass()?;
    let clang = format!("clang-{}", cls::version()?);
    let mut command = Command::new("make");
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    command.arg(format!("-j{jobs}")).current_dir(directory(build));
    environment(&mut command, &pass, &clang);
    Some(command)
}

fn environment<'a>(command: &'a mut Command, pass: &Path, clang: &str) -> &'a mut Command {
    command
        .env("ORRERY_CLS_LIB", pass.join("lib"))
        .env("ORRERY_CLS_SHARED", SHARED)
        .env("ORRERY_CLANG", clang);
    command.env_remove("MAKEFLAGS").env_remove("MAKELEVEL")
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    let text = [&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat();
    let end: String = text.chars().rev().take(4000).collect::<Vec<_>>().into_iter().rev().collect();
    assert!(output.status.success(), "{command:?}: {}\n{end}", output.status);
}
