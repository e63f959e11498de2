//! What the meaning of a change may cost. Exact statements can be as many as rules times pieces of the address line, so a small document
//! may ask for more than any machine has. The engine counts its steps and what it keeps, and gives up in time: without a clock, so that
//! the same question gets the same answer everywhere.

/// Steps of one meaning. A step is a cut of the address line, or one range of traffic that is looked at.
pub const WORK_MAX: u64 = 100_000_000;
/// Ranges, cuts and names held at once. Each takes at most some 50 bytes.
pub const HELD_MAX: u64 = 6_000_000;
/// Steps between two questions whether to go on.
const ASKED_EVERY: u64 = 50_000;

/// Why a meaning was not computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Exceeded {
    #[error("it takes more than {WORK_MAX} steps to say what this means: split it into smaller changes")]
    Work,
    #[error("what this means has more than {HELD_MAX} parts: split it into smaller changes")]
    Held,
    #[error("the computation was stopped")]
    Stopped,
}

pub struct Budget<'a> {
    work_left: u64,
    held_left: u64,
    until_asked: u64,
    goes_on: &'a dyn Fn() -> bool,
}

impl<'a> Budget<'a> {
    /// The usual limits; `goes_on` is asked now and then, and its `false` stops the computation.
    pub fn new(goes_on: &'a dyn Fn() -> bool) -> Self {
        Self::limited(WORK_MAX, HELD_MAX, goes_on)
    }

    pub fn limited(work: u64, held: u64, goes_on: &'a dyn Fn() -> bool) -> Self {
        Self { work_left: work, held_left: held, until_asked: ASKED_EVERY, goes_on }
    }

    pub(crate) fn spend(&mut self, steps: usize) -> Result<(), Exceeded> {
        let steps = steps as u64;
        self.work_left = self.work_left.checked_sub(steps).ok_or(Exceeded::Work)?;
        self.until_asked = match self.until_asked.checked_sub(steps) {
            Some(left) => left,
            None if (self.goes_on)() => ASKED_EVERY,
            None => return Err(Exceeded::Stopped),
        };
        Ok(())
    }

    /// As many more are held from now on.
    pub(crate) fn hold(&mut self, count: usize) -> Result<(), Exceeded> {
        self.held_left = self.held_left.checked_sub(count as u64).ok_or(Exceeded::Held)?;
        self.spend(count)
    }

    /// As many less are held from now on.
    pub(crate) fn release(&mut self, count: usize) {
        self.held_left = self.held_left.saturating_add(count as u64);
    }
}
