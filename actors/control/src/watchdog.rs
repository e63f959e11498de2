//! Sees to it that every actor answers.
//!
//! An actor that stops on purpose, because what it listens to ended, is started again by its supervisor with what it knows. One that
//! panics is not: what it knows may be half of a change, and a controller that goes on with that would publish it. It does not
//! answer any more, the process lets go of the leadership and ends with a word of why, and whoever runs it starts it again: it reads
//! everything anew, while another controller leads.

use std::time::Duration;

use actix::prelude::*;

use crate::actors::Ping;

/// How long an actor may take to answer before it counts as dead.
pub const ANSWER_DEADLINE: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("actor {0} does not answer: restart the controller")]
pub struct Dead(pub &'static str);

#[derive(Default)]
pub struct Watchdog(Vec<(&'static str, Recipient<Ping>)>);

impl Watchdog {
    pub fn watch(mut self, name: &'static str, actor: Recipient<Ping>) -> Self {
        self.0.push((name, actor));
        self
    }

    /// Fails with the first that does not answer.
    pub async fn look(&self) -> Result<(), Dead> {
        for (name, actor) in &self.0 {
            match tokio::time::timeout(ANSWER_DEADLINE, actor.send(Ping)).await {
                Ok(Ok(())) => {}
                _ => return Err(Dead(name)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Message)]
    #[rtype(result = "()")]
    enum Do {
        Stop,
        Panic,
    }

    /// Counts its lives; what it knows stays when it is started again.
    struct Frail {
        lives: u32,
    }

    impl Actor for Frail {
        type Context = Context<Self>;

        fn started(&mut self, _: &mut Self::Context) {
            self.lives += 1;
        }
    }

    impl Supervised for Frail {}

    impl Handler<Ping> for Frail {
        type Result = ();

        fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
    }

    impl Handler<Do> for Frail {
        type Result = ();

        fn handle(&mut self, order: Do, context: &mut Self::Context) {
            match order {
                Do::Stop => context.stop(),
                Do::Panic => panic!("told to"),
            }
        }
    }

    #[derive(Message)]
    #[rtype(result = "u32")]
    struct Lives;

    impl Handler<Lives> for Frail {
        type Result = u32;

        fn handle(&mut self, _: Lives, _: &mut Self::Context) -> u32 {
            self.lives
        }
    }

    #[actix::test]
    async fn who_stops_is_started_again_and_who_panics_is_named() {
        let (sturdy, frail) = (Supervisor::start(|_| Frail { lives: 0 }), Supervisor::start(|_| Frail { lives: 0 }));
        let dog = Watchdog::default().watch("sturdy", sturdy.clone().recipient()).watch("frail", frail.clone().recipient());
        assert_eq!(dog.look().await, Ok(()));
        frail.send(Do::Stop).await.expect("it hears it");
        assert_eq!((dog.look().await, frail.send(Lives).await.ok()), (Ok(()), Some(2)), "the same actor, started again");
        assert!(frail.send(Do::Panic).await.is_err());
        assert_eq!(dog.look().await, Err(Dead("frail")));
        assert_eq!(sturdy.send(Lives).await.ok(), Some(1), "others go on");
    }
}
