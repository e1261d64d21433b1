//! One session's pages in token order; with one token per page a page is a slot. Four bytes per page, grown in small
//! steps: held tokens are counted in millions (issue: ≤ 12 bytes per token, history included).

use crate::worker::api::Slot;

use super::pages;

/// The pages of tokens `[0, len · page_tokens)`; the last page may be used in part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pages: Vec<u32>,
    page_tokens: u32,
}

impl Table {
    /// An empty table. `page_tokens` is at least 1.
    pub fn new(page_tokens: u32) -> Table {
        Table {
            pages: Vec::new(),
            page_tokens: page_tokens.max(1),
        }
    }

    /// From the first slots of whole pages, as the allocator hands them out: one slot per token.
    pub fn of_slots(slots: &[i64], page_tokens: u32) -> Table {
        let mut table = Table::new(page_tokens);
        table.push_slots(slots);
        table
    }

    /// Pages in the table.
    pub fn len(&self) -> u32 {
        u32::try_from(self.pages.len()).unwrap_or(u32::MAX)
    }

    /// No page at all.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The pages in token order.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        self.pages.capacity() * size_of::<u32>()
    }

    /// Takes in the pages that the engine's row names for tokens up to `tokens`; pages that are in the table stay as
    /// they are. Stops early where the row is too short or names no slot.
    pub fn extend_from_row(&mut self, tokens: u32, row: &[i32]) {
        let (have, want) = (self.pages.len(), pages(tokens, self.page_tokens) as usize);
        reserve_tight(&mut self.pages, want.saturating_sub(have));
        for page in have..want {
            match page_in_row(row, page, self.page_tokens) {
                Some(p) => self.pages.push(p),
                None => return,
            }
        }
    }

    /// Puts the row's pages in place of the first `count`; calls `replaced(page index, old page)` where they differ.
    pub fn replace_from_row(&mut self, count: u32, row: &[i32], mut replaced: impl FnMut(u32, u32)) {
        for (index, page) in (0u32..).zip(self.pages.iter_mut().take(count as usize)) {
            let Some(new) = page_in_row(row, index as usize, self.page_tokens) else {
                return;
            };
            if new != *page {
                replaced(index, std::mem::replace(page, new));
            }
        }
    }

    /// Appends the pages of whole-page slot lists.
    pub fn push_slots(&mut self, slots: &[i64]) {
        reserve_tight(&mut self.pages, slots.len() / self.page_tokens as usize);
        let firsts = slots.iter().step_by(self.page_tokens as usize);
        self.pages
            .extend(firsts.map_while(|&s| Some(u32::try_from(s).ok()? / self.page_tokens)));
    }

    /// Takes the pages from `at` on off the table.
    pub fn split_off(&mut self, at: u32) -> Table {
        let pages = self.pages.split_off((at as usize).min(self.pages.len()));
        Table {
            pages,
            page_tokens: self.page_tokens,
        }
    }

    /// Appends another table's pages.
    pub fn append(&mut self, other: &Table) {
        reserve_tight(&mut self.pages, other.pages.len());
        self.pages.extend_from_slice(&other.pages);
    }

    /// Keeps the first `keep` pages and names the first slot of each page that goes.
    pub fn cut(&mut self, keep: u32, freed: &mut Vec<Slot>) {
        let keep = (keep as usize).min(self.pages.len());
        freed.extend(self.pages[keep..].iter().map(|p| p * self.page_tokens));
        self.pages.truncate(keep);
        if self.pages.capacity() > 2 * keep + 64 {
            self.pages.shrink_to(keep + keep / 8);
        }
    }

    /// The slots of the first `out.len()` tokens; fewer if the table is shorter (the rest of `out` stays).
    pub fn slots_into(&self, out: &mut [i64]) {
        if self.page_tokens == 1 {
            for (o, p) in out.iter_mut().zip(&self.pages) {
                *o = i64::from(*p);
            }
            return;
        }
        for (chunk, p) in out.chunks_mut(self.page_tokens as usize).zip(&self.pages) {
            let first = i64::from(*p) * i64::from(self.page_tokens);
            for (o, slot) in chunk.iter_mut().zip(first..) {
                *o = slot;
            }
        }
    }

    /// The slots of tokens `[from, to)`, as far as the table goes.
    pub fn slots(&self, from: u32, to: u32) -> Vec<Slot> {
        let to = to.min(self.len().saturating_mul(self.page_tokens));
        (from..to)
            .map(|t| self.pages[(t / self.page_tokens) as usize] * self.page_tokens + t % self.page_tokens)
            .collect()
    }
}

/// Room for `more`, in steps of an eighth: doubling would cost up to 8 bytes per token for nothing.
pub(crate) fn reserve_tight<T>(v: &mut Vec<T>, more: usize) {
    if v.capacity() - v.len() < more {
        v.reserve_exact(more.max(v.len() / 8));
    }
}

fn page_in_row(row: &[i32], page: usize, page_tokens: u32) -> Option<u32> {
    let slot = *row.get(page * page_tokens as usize)?;
    Some(u32::try_from(slot).ok()? / page_tokens)
}
