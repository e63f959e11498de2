//! The controller's actors, as a library that the `groupcast` binary embeds, and the clients that write what they follow.
//!
//! Plain data and machines, without clock and IO:
//! - [`document`], [`change`]: what lies in CATALOG and REGISTRY, and what is written together
//! - [`assemble`]: whole changes out of a stream's messages
//! - [`mirror`]: what the streams say, as events for the compiler; the last good version of what cannot be read
//! - [`compiled`], [`outbox`], [`stage`]: compiling, comparing, merging what waits
//! - [`progress`]: which hosts have which change in force, kept by `groupcast-topics`
//! - [`registration`]: what a host may register, how long silence is forgiven, and when too many are silent at once
//! - [`estimate`]: whether a change can be published, known before it is written
//!
//! - [`source`]: what other systems say, compared with what they own
//! - [`difference`]: what one version of a document changed in the one before
//! - [`names`]: the names of all metrics
//!
//! On the bus: [`log`], a stream read from its leader and written by compare-and-swap; [`catalog`] and [`registry`], the clients that
//! write, held up by [`pressure`]; [`begin`], the first word on a new bus; [`audit`], who wrote what, and whether anything is missing; [`export`], everything as a file and back; [`actors`], one file each; [`controller`], all of them
//! together, watched over by [`watchdog`].

pub mod actors;
pub mod assemble;
mod attempt;
pub mod audit;
pub mod begin;
pub mod catalog;
pub mod change;
pub mod compiled;
pub mod controller;
pub mod difference;
pub mod document;
pub mod estimate;
pub mod export;
pub mod feed;
pub mod fence;
pub mod log;
pub mod mirror;
pub mod names;
pub mod outbox;
pub mod place;
pub mod pressure;
pub mod progress;
pub mod registration;
pub mod registry;
pub mod source;
pub mod stage;
pub mod terms;
mod together;
pub mod watchdog;
