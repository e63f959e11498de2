//! Documents that many want to read at once, read once for all of them.
//!
//! Nothing is kept: a read that had begun before somebody asked may be too old for them, so they share the next one. Thousands of
//! hosts that enrol with one template cost a few reads of it, and a template that was deleted a moment ago is gone for all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};

use crate::catalog::{Catalog, Version};
use crate::document::Name;
use crate::log::NoAnswer;

type Answer = Result<Option<Arc<Version>>, NoAnswer>;
type Reading = Shared<BoxFuture<'static, Answer>>;

#[derive(Default)]
struct Open {
    /// Reads that have not begun: whoever asks joins them.
    joining: HashMap<Name, Reading>,
    /// Held by the read of a document that is on its way.
    turns: HashMap<Name, Arc<tokio::sync::Mutex<()>>>,
}

/// How one document is read.
type Read = Arc<dyn Fn(Name) -> BoxFuture<'static, Answer> + Send + Sync>;

#[derive(Clone)]
pub struct SharedReads {
    read_one: Read,
    open: Arc<Mutex<Open>>,
}

impl SharedReads {
    pub fn of(catalog: Catalog) -> Self {
        Self::new(Arc::new(move |name| {
            let catalog = catalog.clone();
            async move { catalog.read(&name).await.map(|version| version.map(Arc::new)) }.boxed()
        }))
    }

    fn new(read_one: Read) -> Self {
        Self { read_one, open: Arc::default() }
    }

    /// The document as it is now or later.
    pub async fn read(&self, name: &Name) -> Answer {
        let reading = {
            let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            match open.joining.get(name) {
                Some(reading) => reading.clone(),
                None => {
                    let turn = open.turns.entry(name.clone()).or_default().clone();
                    let reading = self.clone().next(name.clone(), turn).boxed().shared();
                    open.joining.insert(name.clone(), reading.clone());
                    reading
                }
            }
        };
        reading.await
    }

    async fn next(self, name: Name, turn: Arc<tokio::sync::Mutex<()>>) -> Answer {
        let held = turn.lock().await;
        // From here on nobody joins: what they want to know may happen after this.
        self.open.lock().unwrap_or_else(PoisonError::into_inner).joining.remove(&name);
        let answer = (self.read_one)(name.clone()).await;
        drop(held);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        // Two hold it while nobody else waits for it: the map and this.
        if open.turns.get(&name).is_some_and(|turn| Arc::strong_count(turn) <= 2) && !open.joining.contains_key(&name) {
            open.turns.remove(&name);
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use groupcast_bus_config::subjects::CatalogKind;
    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn whoever_asks_shares_a_read_that_has_not_begun_and_none_that_has() {
        let (begun, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
        let reads = {
            let (begun, gate) = (begun.clone(), gate.clone());
            SharedReads::new(Arc::new(move |_| {
                let (begun, gate) = (begun.clone(), gate.clone());
                async move {
                    begun.fetch_add(1, Ordering::SeqCst);
                    gate.acquire().await.expect("open").forget();
                    Ok(None)
                }
                .boxed()
            }))
        };
        let name = Name::new(CatalogKind::Template, "t").unwrap();
        let ask = || {
            let (reads, name) = (reads.clone(), name.clone());
            tokio::spawn(async move { reads.read(&name).await.map(|found| found.is_none()) })
        };
        let first = ask();
        while begun.load(Ordering::SeqCst) < 1 {
            tokio::task::yield_now().await;
        }
        // The first is on its way: these twenty need another, and one is enough for all.
        let later: Vec<_> = (0..20).map(|_| ask()).collect();
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(begun.load(Ordering::SeqCst), 1);
        gate.add_permits(2);
        assert!(first.await.unwrap().unwrap());
        for one in later {
            assert!(one.await.unwrap().unwrap());
        }
        assert_eq!(begun.load(Ordering::SeqCst), 2);
        let open = reads.open.lock().unwrap();
        assert!(open.joining.is_empty() && open.turns.is_empty(), "nothing is kept");
    }
}
