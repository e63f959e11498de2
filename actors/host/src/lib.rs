//! The host agent: topics in, nftables out. GPL-3.0-or-later, because it links [`rustables`]; no other crate may use this one.
//!
//! Empty so far. Here will live the netlink transaction, the attachment of workloads to interfaces and addresses, the last
//! good state on disk, the local API and the binary `groupcast-agent`. What the kernel should hold is decided in
//! `groupcast-enforce`; which topics the host needs and whether they are whole, in `groupcast-topics`.

// Linked already, so that the licence checks judge the real dependency graph and the build needs its real packages.
use rustables as _;
