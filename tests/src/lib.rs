//! What the end-to-end tests share: a bus of their own, controllers and hosts on it, and the words to say what should happen.

pub mod agent;
pub mod chronicle;
pub mod control;
pub mod desk;
pub mod enrolled;
pub mod fake;
pub mod field;
pub mod fleet;
pub mod gateway;
pub mod marks;
pub mod relay;
pub mod world;

pub use world::World;
