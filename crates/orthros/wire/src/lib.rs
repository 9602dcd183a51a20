//! The protocol between the host and the guests of a pair, and the service description that the guests' image carries.
//!
//! Host and guest come from one build, and both use these types: [`Request`]s go to a guest and [`Report`]s come back, each one
//! line of JSON on the guest's second serial port. The [`ServiceDescription`] is a file of the image.

mod message;
mod service;

pub use message::{Report, Request, ServiceExit, Step, Summary, TmpfsFiles, WrittenBack, decode, encode};
pub use service::{
    Credentials, Directory, ExecCommand, ExecConfig, MainProcess, SERVICE_DESCRIPTION, ServiceDescription,
    WorkingDirectory,
};
