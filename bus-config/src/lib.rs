//! The bus as groupcast uses it: every name, stream, account and permission, and the servers that carry them.
//!
//! - [`accepting`]: what a loop that accepts connections does when it cannot
//! - [`accounts`]: who may do what, one table
//! - [`alive`]: whether the bus does its work
//! - [`connect`]: a connection that comes back, and what happens to it
//! - [`credentials`]: keys, signed tokens, rotation and revocation
//! - [`held`]: what a credentials file says about its holder
//! - [`subjects`]: every subject, from typed functions; no other file formats one
//! - [`streams`]: the streams as data, created and then checked against what the server stored
//! - [`lab`]: hosts on one machine, in network namespaces, with agents that are processes
//! - [`settings`]: configuration files, their sections and the reference of what they may say
//! - [`reach`]: whether a server can be reached, and what it shows
//! - [`setup`]: a whole installation as a plan, and the files of its machines
//! - [`server`]: finding, starting, hurting and ending a nats-server, alone or as a cluster of three
//!
//! Why answers to hosts have a subject of their own ([`subjects::answer`]) instead of the reply field is said in [`subjects`].

pub mod accepting;
pub mod accounts;
pub mod alive;
pub mod connect;
pub mod credentials;
pub mod head;
pub mod held;
pub mod lab;
pub mod reach;
pub mod server;
pub mod settings;
pub mod setup;
pub mod shown;
pub mod streams;
pub mod subjects;
