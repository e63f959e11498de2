//! What the end-to-end tests share: a bus of their own, controllers and hosts on it, and the words to say what should happen.

pub mod agent;
pub mod chronicle;
pub mod control;
pub mod desk;
pub mod disk;
pub mod enrolled;
pub mod fake;
pub mod field;
pub mod fleet;
pub mod gateway;
pub mod guard;
pub mod installation;
pub mod marks;
pub mod middle;
pub mod nodes;
pub mod relay;
pub mod skew;
pub mod world;

pub use world::World;
