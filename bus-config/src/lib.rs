//! The bus as groupcast uses it: every name, stream, account and permission, and the servers that carry them.
//!
//! - [`accounts`]: who may do what, one table
//! - [`connect`]: a connection that comes back, and what happens to it
//! - [`credentials`]: keys, signed tokens, rotation and revocation
//! - [`subjects`]: every subject, from typed functions; no other file formats one
//! - [`streams`]: the streams as data, created and then checked against what the server stored
//! - [`lab`]: hosts on one machine, in network namespaces, with agents that are processes
//! - [`settings`]: configuration files, their sections and the reference of what they may say
//! - [`server`]: finding, starting, hurting and ending a nats-server, alone or as a cluster of three
//!
//! Why answers to hosts have a subject of their own ([`subjects::answer`]) instead of the reply field is said in [`subjects`].

pub mod accounts;
pub mod connect;
pub mod credentials;
pub mod lab;
pub mod server;
pub mod settings;
pub mod streams;
pub mod subjects;
