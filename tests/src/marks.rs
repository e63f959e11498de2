//! Numbered changes whose traces tell, in any state, which changes it holds: every change marks the members of each group it
//! touches with its own number, so a state that mixes two changes shows.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use groupcast_messages::Cut;
use groupcast_policy::doc::{Document, Edit};
use groupcast_policy::needs::Documents;
use groupcast_policy::topic::Topic;
use groupcast_topics::batch::Refused;
use groupcast_topics::nats::{NodeHandle, OnCommit};
use groupcast_topics::node::Committed;
use groupcast_topics::reader::{Commit, Reader};

use crate::fleet::{address, group};
use crate::world::{DEADLINE, World, Written, publish};

/// The first number of a change: setting up a world takes a few before.
const FIRST: u32 = 1_000;

#[derive(Default)]
struct History {
    /// Which changes touched a topic, in order.
    touched: BTreeMap<Topic, Vec<u32>>,
    made: u32,
    /// When a change was known to be committed.
    committed: BTreeMap<u32, Instant>,
    /// Where changes are written down before they are published, as CATALOG would have them.
    written: Option<Written>,
}

/// What was marked, shared by the writer and everyone who checks.
#[derive(Clone, Default)]
pub struct Marks(Arc<Mutex<History>>);

/// The number of the last change that a document of members holds; 0 before the first.
pub fn mark_of(document: Option<&Document>) -> u32 {
    let last = document.and_then(Document::members).and_then(|members| members.v4.max());
    last.map_or(0, |bits| bits - 0x0a00_0000)
}

fn topic(name: &str) -> Topic {
    Topic::Members(group(name))
}

impl Marks {
    /// Whoever has to compile topics from scratch, because they are lost or because a busy machine's controllers do not hear each
    /// other in time, knows every change that was made.
    pub fn written_in(world: &World) -> Self {
        let marks = Self::default();
        marks.0.lock().expect("lock").written = Some(world.written.clone());
        marks
    }

    /// The next change: one topic for each of the groups.
    pub fn next<S: AsRef<str>>(&self, groups: &[S]) -> (u32, Vec<(Topic, Edit)>) {
        let mut history = self.0.lock().expect("lock");
        history.made += 1;
        let number = FIRST + history.made;
        let mut edits = Vec::with_capacity(groups.len());
        for name in groups {
            let topic = topic(name.as_ref());
            let touched = history.touched.entry(topic.clone()).or_default();
            let remove = touched.last().map(|before| address(*before)).into_iter().collect();
            touched.push(number);
            edits.push((topic, Edit::Members { add: vec![address(number)], remove }));
        }
        if let Some(written) = &history.written {
            written.write(&edits);
        }
        (number, edits)
    }

    /// Publishes the next change through a leader that nothing happens to.
    pub async fn publish<S: AsRef<str>>(&self, node: &NodeHandle, groups: &[S]) -> Committed {
        let (number, edits) = self.next(groups);
        let committed = publish(node, number.into(), edits).await.expect("the leader leads");
        self.0.lock().expect("lock").committed.insert(number, Instant::now());
        committed
    }

    /// Publishes the next change through whoever leads, as often as it takes; says how often it was refused before.
    pub async fn publish_whatever_happens<S: AsRef<str>>(&self, nodes: &[&NodeHandle], groups: &[S]) -> usize {
        let (number, edits) = self.next(groups);
        let start = Instant::now();
        for refused in 0.. {
            while !nodes.iter().any(|node| node.leading().borrow().is_some()) {
                assert!(start.elapsed() < DEADLINE, "nobody leads to publish change {number}");
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            let Some(leader) = nodes.iter().find(|node| node.leading().borrow().is_some()) else { continue };
            match publish(leader, number.into(), edits.clone()).await {
                Ok(_) => {
                    self.0.lock().expect("lock").committed.insert(number, Instant::now());
                    return refused;
                }
                // Its fate is unknown; published again it changes nothing if it is there already.
                Err(Refused::NotLeading) => {}
                Err(other) => panic!("change {number}: {other}"),
            }
            assert!(start.elapsed() < DEADLINE, "change {number} is refused again and again");
        }
        unreachable!()
    }

    /// The last change turned out never to have been published, and is taken back.
    pub fn forget(&self, number: u32) {
        let mut guard = self.0.lock().expect("lock");
        let history = &mut *guard;
        let mut undone = Vec::new();
        for (topic, touched) in history.touched.iter_mut().filter(|(_, touched)| touched.last() == Some(&number)) {
            touched.pop();
            let add = touched.last().map(|before| address(*before)).into_iter().collect();
            undone.push((topic.clone(), Edit::Members { add, remove: vec![address(number)] }));
        }
        if let Some(written) = &history.written {
            written.write(&undone);
        }
    }

    /// The number of the last change made.
    pub fn last(&self) -> u32 {
        FIRST + self.0.lock().expect("lock").made
    }

    /// When the first of the changes after `from` and up to `to` that touch any of these topics was committed.
    fn earliest_commit<'a>(&self, topics: impl Iterator<Item = &'a Topic>, from: u32, to: u32) -> Option<Instant> {
        let history = self.0.lock().expect("lock");
        let touched = topics.filter_map(|topic| history.touched.get(topic));
        let first = |touched: &Vec<u32>| touched.get(touched.partition_point(|number| *number <= from)).copied();
        let number = touched.filter_map(first).filter(|number| *number <= to).min()?;
        history.committed.get(&number).copied()
    }

    /// Checks that no change is exposed in part.
    pub fn check<'a>(&self, documents: impl Iterator<Item = (&'a Topic, &'a Document)>) -> Result<Shown, String> {
        let history = self.0.lock().expect("lock");
        let marks: Vec<(&Topic, u32, &Vec<u32>)> = documents
            .filter_map(|(topic, document)| Some((topic, mark_of(Some(document)), history.touched.get(topic)?)))
            .collect();
        let latest = marks.iter().map(|(_, mark, _)| *mark).max().unwrap_or(0);
        let mut missed: Option<u32> = None;
        for (topic, mark, touched) in &marks {
            let first = touched.partition_point(|number| number <= mark);
            for number in touched[first..].iter().take_while(|number| **number <= latest) {
                let shown =
                    |(_, mark, touched): &&(&Topic, u32, &Vec<u32>)| mark >= number && touched.binary_search(number).is_ok();
                if let Some((other, ..)) = marks.iter().find(shown) {
                    return Err(format!("{topic} shows change {mark} and {other} shows change {number}, which touched both"));
                }
                missed = Some(missed.map_or(*number, |before| before.min(*number)));
            }
        }
        let missed = missed.and_then(|number| history.committed.get(&number).copied());
        Ok(Shown { latest, missed })
    }

    /// Whether the node has published every change that was made, whole.
    pub async fn all_published(&self, node: &NodeHandle) {
        let expected: Vec<(Topic, u32)> = {
            let history = self.0.lock().expect("lock");
            history.touched.iter().map(|(topic, touched)| (topic.clone(), touched.last().copied().unwrap_or(0))).collect()
        };
        let wrong = node.inspect(move |node, _| {
            let replica = node.replica();
            let found = |topic: &Topic| mark_of(replica.document(topic));
            expected
                .iter()
                .filter(|(topic, mark)| found(topic) != *mark)
                .map(|(t, m)| (t.clone(), *m, found(t)))
                .collect::<Vec<_>>()
        });
        let wrong = wrong.await.expect("the node lives");
        let some = &wrong[..wrong.len().min(10)];
        assert!(
            wrong.is_empty(),
            "acknowledged changes are lost in {} topics (topic, acknowledged, found): {some:?} …",
            wrong.len()
        );
    }

    /// A watch that checks every exposed state of one reader.
    pub fn watch(&self) -> (Witness, OnCommit) {
        let witness = Witness::default();
        (witness.clone(), witness.on_commit(self.clone()))
    }
}

/// What a state holds.
#[derive(Debug, Clone, Copy)]
pub struct Shown {
    pub latest: u32,
    /// There is a hole: a whole earlier change is not there, because its messages were lost on the way. When it was committed.
    pub missed: Option<Instant>,
}

#[derive(Default)]
struct Seen {
    wrong: Vec<String>,
    commits: u64,
    cut: Option<Cut>,
    /// Where a topic was last changed.
    cuts: BTreeMap<Topic, Cut>,
    /// Term and revision of what is exposed.
    revisions: BTreeMap<Topic, (u64, u64)>,
    change: u32,
    longest: Duration,
    /// The hole that is open, since the missed change was committed.
    hole: Option<Instant>,
    holes: Vec<Duration>,
    first: Option<(Instant, u32)>,
}

/// What one reader has exposed so far.
#[derive(Clone, Default)]
pub struct Witness(Arc<Mutex<Seen>>);

impl Witness {
    fn on_commit(&self, marks: Marks) -> OnCommit {
        let seen = self.0.clone();
        Box::new(move |reader, commit| {
            let mut seen = seen.lock().expect("lock");
            if let Err(wrong) = seen.look(&marks, reader, commit) {
                seen.wrong.push(format!("commit {} at {:?}: {wrong}", commit.number, reader.cut()));
            }
            true
        })
    }

    /// Fails unless every state was whole and nothing was applied twice; says how many states there were.
    pub fn assert_whole(&self) -> u64 {
        let seen = self.0.lock().expect("lock");
        assert!(seen.wrong.is_empty(), "{:#?}", seen.wrong);
        seen.commits
    }

    /// The longest time between a change being committed and this reader exposing it, after its first complete sync.
    pub fn longest_behind(&self) -> Duration {
        self.0.lock().expect("lock").longest
    }

    /// How long holes stayed open: from the commit of a change that was missed to the state in which it was made up for.
    pub fn holes(&self) -> Vec<Duration> {
        let seen = self.0.lock().expect("lock");
        assert!(seen.hole.is_none(), "a hole is open at the end");
        seen.holes.clone()
    }

    pub fn commits(&self) -> u64 {
        self.0.lock().expect("lock").commits
    }
}

impl Seen {
    fn look(&mut self, marks: &Marks, reader: &Reader, commit: &Commit) -> Result<(), String> {
        self.commits += 1;
        let cut = reader.cut();
        if cut < self.cut {
            return Err(format!("went back from {:?}", self.cut));
        }
        self.cut = cut;
        let mut edited: BTreeMap<&Topic, Vec<&Edit>> = BTreeMap::new();
        for (topic, edit) in &commit.edits {
            // An edit leads from one cut to a later one; a document fetched anew stands at the cut of the answer.
            let before = self.cuts.get(topic).copied();
            if edit.is_some() && before.is_some_and(|before| commit.cut <= before) {
                return Err(format!("{topic} is edited again at {:?} after {before:?}", commit.cut));
            }
            // Changes that arrived at once are one commit. Each edit of members brings an address of its own, so two alike are one applied
            // twice; a host's tallies change nothing and are all alike.
            let Some(edit @ Edit::Members { .. }) = edit else { continue };
            let earlier = edited.entry(topic).or_default();
            if earlier.contains(&edit) {
                return Err(format!("{topic} is edited twice at {:?}", commit.cut));
            }
            earlier.push(edit);
        }
        for (topic, _) in &commit.edits {
            let before = self.cuts.get(topic).copied().unwrap_or_default();
            self.cuts.insert(topic.clone(), before.max(commit.cut));
        }
        for (topic, _) in reader.documents() {
            let now = (cut.map_or(0, |cut| cut.term), reader.revision(topic).unwrap_or(0));
            let before = self.revisions.insert(topic.clone(), now).unwrap_or_default();
            if now < before {
                return Err(format!("{topic} went back to {now:?} from {before:?}"));
            }
        }
        for topic in &commit.dropped {
            self.revisions.remove(topic);
            self.cuts.remove(topic);
        }
        let Shown { latest: change, missed } = marks.check(reader.documents())?;
        if change < self.change && commit.dropped.is_empty() {
            return Err(format!("shows change {change} after change {}", self.change));
        }
        let now = Instant::now();
        match missed {
            Some(at) => self.hole = Some(self.hole.map_or(at, |before| before.min(at))),
            None => self.holes.extend(self.hole.take().map(|at| now.saturating_duration_since(at))),
        }
        let (_, joined) = *self.first.get_or_insert((now, change));
        if let Some(at) = marks.earliest_commit(reader.documents().map(|(topic, _)| topic), self.change.max(joined), change) {
            self.longest = self.longest.max(now.saturating_duration_since(at));
        }
        self.change = change;
        Ok(())
    }
}
