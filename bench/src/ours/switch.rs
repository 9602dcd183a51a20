//! Contexts: there and back.

use anyhow::{Result, ensure};
use orrery_context::{Context, Spec, create};
use orrery_vault::Vault;

use crate::contender::{Contender, Sample};
use crate::rival::round_trips;

/// Switches to a context that switches back.
#[derive(Debug)]
pub struct ContextSwitch {
    other: Context,
}

impl ContextSwitch {
    /// Creates the context.
    pub fn new() -> Result<Self> {
        let other = create(&Spec::new(), |start| {
            let mut arrival = start.arrival;
            loop {
                arrival = match arrival.caller.switch(arrival.word + 1, &[]) {
                    Ok(arrival) => arrival,
                    Err(error) => panic!("{error}"),
                };
            }
        })?;
        Ok(Self { other })
    }
}

impl Contender for ContextSwitch {
    fn measure(&mut self, _work: &str, iterations: u32) -> Result<Sample> {
        round_trips(iterations, |round| {
            let back = self.other.switch(u64::from(round), &[])?;
            ensure!(back.word == u64::from(round) + 1, "it came back with {}", back.word);
            Ok(())
        })
    }
}

/// Calls of a vault that adds up 32 bytes.
#[derive(Debug)]
pub struct VaultCall {
    vault: Vault,
}

impl VaultCall {
    /// Makes the vault.
    pub fn new() -> Result<Self> {
        let vault = Vault::new(
            || Ok::<_, std::io::Error>(7_u8),
            |secret, input| vec![input.iter().fold(*secret, |sum, byte| sum.wrapping_add(*byte))],
        )?;
        Ok(Self { vault })
    }
}

impl Contender for VaultCall {
    fn measure(&mut self, _work: &str, iterations: u32) -> Result<Sample> {
        round_trips(iterations, |_| {
            let answer = self.vault.call(&[1; 32])?;
            ensure!(answer == [39], "it answered {answer:?}");
            Ok(())
        })
    }
}
