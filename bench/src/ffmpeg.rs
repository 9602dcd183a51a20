//! Test videos, which ffmpeg draws and encodes.

/// The path of ffmpeg.
pub const FFMPEG: &str = "/usr/bin/ffmpeg";

/// Returns the arguments of ffmpeg: which video to draw (options of `testsrc2` in ffmpeg-filters(1); without a duration it does not
/// end), and how to encode it, in one thread. It prints its progress in lines such as `frame=42`.
pub fn encode(film: &str, codec: &[&str]) -> Vec<String> {
    let source = format!("testsrc2={film}");
    let before = ["-nostdin", "-loglevel", "error", "-progress", "pipe:1", "-f", "lavfi", "-i", &source];
    let parts = [&before[..], &["-threads", "1", "-c:v"], codec, &["-f", "null", "-"]];
    parts.concat().into_iter().map(str::to_owned).collect()
}

/// Returns how many frames a line of the progress names.
#[must_use]
pub fn frames_of(line: &str) -> Option<u64> {
    line.strip_prefix("frame=").and_then(|text| text.trim().parse().ok())
}
