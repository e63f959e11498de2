//! Counts the memory of the current thread, to hold decoders to the size of their input.
#![allow(unsafe_code)] // An allocator cannot be written otherwise; this one only counts and passes on.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

pub struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    // A thread's last deallocations may come after its counters are gone.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
    });
}

// SAFETY: every call goes to the system's allocator unchanged; counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both copies may exist for a moment.
        count(size as isize);
        count(-(layout.size() as isize));
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A byte of input may become this many bytes of memory: a member of one byte as a gap is eighteen as a prefix, a label of two bytes a
/// node of a tree.
pub const MEMORY_FACTOR_MAX: usize = 64;
/// What any decoding may use.
pub const MEMORY_BASE_BYTES: usize = 4096;

pub fn memory_bytes_max(input_bytes: usize) -> usize {
    MEMORY_BASE_BYTES + MEMORY_FACTOR_MAX * input_bytes
}

/// Runs `work` and says how much memory it held at most.
pub fn peak_bytes<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = work();
    (result, usize::try_from(PEAK.get() - before).unwrap_or(0))
}
