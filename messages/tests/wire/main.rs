//! The messages from outside: golden bytes, round trips, versions, limits, sizes, and whatever bytes come.

mod golden;
mod limits;
mod round_trip;
mod sizes;
mod strict;
mod support;
mod total;
mod versions;
