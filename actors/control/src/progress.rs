//! Which hosts have which change in force: kept by the topics node of every controller, whether it leads or not, because
//! acknowledgements and batches reach all of them.

pub use groupcast_topics::convergence::{
    BATCHES_MAX, BEHIND_NAMED_MAX, Convergence, Progress, Summary, UNREACHABLE_AFTER_MS, Why,
};
