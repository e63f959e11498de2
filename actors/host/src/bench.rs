//! What enforcing costs, on the real kernel, in network namespaces of its own. Each figure has its baseline in the same run.

mod enforce;
mod lane;
mod packets;

#[cfg(test)]
pub(crate) use enforce::documents;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Runs one by its name; the figures as a JSON object, by the names of its results.
pub fn run(name: &str) -> Result<serde_json::Value, Failure> {
    let name = name.to_owned();
    let bench = std::thread::spawn(move || -> Result<serde_json::Value, Failure> {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)
            .map_err(|error| format!("no network namespace ({error}): run it as root"))?;
        match name.as_str() {
            "enforce" => Ok(serde_json::to_value(enforce::run()?)?),
            "packets" => Ok(serde_json::to_value(packets::run()?)?),
            other => Err(format!("there is no benchmark {other:?}: enforce and packets are").into()),
        }
    });
    bench.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
