//! Registration without clock and IO: events and the time in, effects out.
//!
//! - [`admit`]: whether a host may register what it asks for
//! - [`checks`]: which hosts are to be told that health is checked in another way
//! - [`grant`]: what an operator has granted to a host, and the token with which it joins
//! - [`lifecycle`]: who is silent for how long, and what comes of it
//! - [`guard`]: when too many are silent at once to believe it
//! - [`queue`]: whose request is answered next, and how many may wait
//! - [`admission`]: how often a host may have something done
//! - [`refusals`]: which of them are written down
//! - [`review`]: whether what is enrolled is still allowed
//! - [`settings`]: how long, how many, how fast

pub use groupcast_topics::admission;

pub mod admit;
pub mod checks;
pub mod grant;
pub mod guard;
pub mod lifecycle;
pub mod queue;
pub mod refusals;
pub mod review;
pub mod settings;
