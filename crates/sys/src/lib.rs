//! Linux facilities that libc and rustix lack: one file each, safe to call, no policy.
