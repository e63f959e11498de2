//! Sources against servers that pretend to be the real ones: every case of CASES.md A, and of B what concerns the source, over real
//! HTTPS; random schedules over the models.

mod clients;
mod cloud_controller;
mod directory;
mod neutron;
mod others;
mod rig;
mod schedules;
mod trust;
