//! Whether a host hears controllers at all from where it is connected. A server that lost its peers keeps its clients, and no controller ever
//! answers there: what a host asks goes unanswered until it goes elsewhere. Plain: the time is told.

/// An answer that has not come by then is asked for once more: one message may be lost.
const ASK_AGAIN_MS: u64 = 5_000;
/// Without any answer for so long to a comparison, which is answered at once, another server is tried.
const LEAVE_MS: u64 = 10_000;
/// The same for a request for topics. It has twelve seconds when the host has just returned (`ask_timeout_back_ms`), and its repetition eight:
/// in a fleet that returns each host waits for its turn. One that left sooner would lose it, and make the others wait longer for theirs. A
/// server that lost its peers is noticed by a comparison, so that nobody stays there longer for this.
const LEAVE_REQUEST_MS: u64 = 20_000;
/// Where no controller runs at all, going elsewhere does not help: the pauses between grow from this ...
const PAUSE_FIRST_MS: u64 = 30_000;
/// ... to this.
const PAUSE_MAX_MS: u64 = 600_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Advice {
    AskAgain,
    Leave,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Question {
    Comparison,
    Request,
}

impl Question {
    const fn leave_ms(self) -> u64 {
        match self {
            Self::Comparison => LEAVE_MS,
            Self::Request => LEAVE_REQUEST_MS,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Unheard {
    /// The first thing that was asked and nobody has answered, and when.
    since: Option<(Question, u64)>,
    asked_again: bool,
    not_before_ms: u64,
    pause_ms: u64,
}

impl Unheard {
    pub fn asked(&mut self, question: Question, now_ms: u64) {
        self.since.get_or_insert((question, now_ms));
    }

    pub fn heard(&mut self) {
        *self = Self::default();
    }

    /// Another connection: what went unanswered on the last one says nothing about it.
    pub fn moved(&mut self) {
        (self.since, self.asked_again) = (None, false);
    }

    pub fn deadline_ms(&self) -> Option<u64> {
        let (question, since) = self.since?;
        Some(if self.asked_again { (since + question.leave_ms()).max(self.not_before_ms) } else { since + ASK_AGAIN_MS })
    }

    /// What is due.
    pub fn tick(&mut self, now_ms: u64) -> Option<Advice> {
        self.deadline_ms().filter(|deadline| *deadline <= now_ms)?;
        if !std::mem::replace(&mut self.asked_again, true) {
            return Some(Advice::AskAgain);
        }
        self.pause_ms = (self.pause_ms * 2).clamp(PAUSE_FIRST_MS, PAUSE_MAX_MS);
        self.not_before_ms = now_ms + self.pause_ms;
        self.moved();
        Some(Advice::Leave)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs it for so long with this question every second, never answered; when it left.
    fn lefts(unheard: &mut Unheard, question: Question, until_s: u64) -> Vec<u64> {
        let mut lefts = Vec::new();
        for now_ms in (0..until_s).map(|second| second * 1_000) {
            unheard.asked(question, now_ms);
            if unheard.tick(now_ms) == Some(Advice::Leave) {
                lefts.push(now_ms / 1_000);
            }
        }
        lefts
    }

    #[test]
    fn a_host_that_nobody_answers_goes_elsewhere_and_then_ever_more_seldom() {
        let mut unheard = Unheard::default();
        assert_eq!(lefts(&mut unheard, Question::Comparison, 1_000), [10, 40, 100, 220, 460, 940]);
        unheard.heard();
        assert_eq!(unheard.deadline_ms(), None);
        assert_eq!(lefts(&mut unheard, Question::Comparison, 20), [10], "its patience is as at first");
    }

    /// A host left after 10 s, while its own request had 12 s to be answered.
    #[test]
    fn nobody_leaves_before_its_request_and_the_repetition_had_their_time() {
        let settings = crate::reader::Settings::default();
        let they_have_s = (settings.ask_timeout_back_ms + 2 * settings.ask_timeout_ms) / 1_000;
        assert!(lefts(&mut Unheard::default(), Question::Request, they_have_s).is_empty());
        assert_eq!(lefts(&mut Unheard::default(), Question::Request, 1_000), [20, 50, 110, 230, 470, 950]);
        // What was asked first decides: a comparison that nobody answers is followed by a request.
        let mut unheard = Unheard::default();
        unheard.asked(Question::Comparison, 0);
        assert_eq!(lefts(&mut unheard, Question::Request, 20), [10]);
    }

    #[test]
    fn one_lost_message_moves_nobody() {
        let mut unheard = Unheard::default();
        unheard.asked(Question::Comparison, 100);
        assert_eq!(unheard.deadline_ms(), Some(100 + ASK_AGAIN_MS));
        assert_eq!(unheard.tick(99 + ASK_AGAIN_MS), None);
        assert_eq!(unheard.tick(100 + ASK_AGAIN_MS), Some(Advice::AskAgain));
        unheard.heard();
        assert_eq!(unheard.tick(1_000_000), None);
    }
}
