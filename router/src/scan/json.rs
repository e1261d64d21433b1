//! A cursor over JSON bytes that skips what nobody asked for. Used by [`super::scan`].

use std::borrow::Cow;

/// Where a body stops being what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected {expected} at byte {at} of the body")]
pub struct BadJson {
    /// Byte offset in the body.
    pub at: usize,
    /// What should stand there.
    pub expected: &'static str,
}

impl BadJson {
    pub(super) fn at(at: usize, expected: &'static str) -> BadJson {
        BadJson { at, expected }
    }
}

/// What an array holds, by its first element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Array {
    /// Numbers; of an array of arrays, those of the first.
    Numbers { count: u32 },
    /// A first element that is a string of so many bytes, quotes included.
    Text { bytes: usize },
    /// Anything else.
    Other,
}

/// Deepest nesting that is read.
const DEPTH_MAX: usize = 128;

pub(super) struct Json<'a> {
    body: &'a [u8],
    at: usize,
    depth: usize,
}

impl<'a> Json<'a> {
    pub fn new(body: &'a [u8]) -> Json<'a> {
        let mut json = Json { body, at: 0, depth: 0 };
        json.blank();
        json
    }

    pub fn position(&self) -> usize {
        self.at
    }

    pub fn peek(&self) -> Option<u8> {
        self.body.get(self.at).copied()
    }

    /// Reads an object; `member` is called at each value and must read it.
    pub fn object<F>(&mut self, expected: &'static str, mut member: F) -> Result<(), BadJson>
    where
        F: FnMut(&mut Json<'a>, &str) -> Result<(), BadJson>,
    {
        self.open(b'{', expected)?;
        if self.close(b'}') {
            return Ok(());
        }
        loop {
            let key = self.string("a key in quotes")?;
            self.blank();
            self.byte(b':', "`:`")?;
            self.blank();
            member(self, &key)?;
            self.blank();
            if self.close(b'}') {
                return Ok(());
            }
            self.byte(b',', "`,` or `}`")?;
            self.blank();
        }
    }

    /// Reads an array and tells what it holds.
    pub fn array(&mut self) -> Result<Array, BadJson> {
        if let Some(count) = self.plain_array() {
            return Ok(Array::Numbers { count });
        }
        self.open(b'[', "an array")?;
        if self.close(b']') {
            return Ok(Array::Numbers { count: 0 });
        }
        let first = self.peek();
        let from = self.at;
        let mut found = match first {
            Some(b'[') => self.array()?,
            Some(b'"') => {
                self.skip()?;
                Array::Text { bytes: self.at - from }
            }
            Some(b'-' | b'0'..=b'9') => {
                self.skip()?;
                Array::Numbers { count: 1 }
            }
            _ => {
                self.skip()?;
                Array::Other
            }
        };
        let flat = !matches!(first, Some(b'['));
        self.blank();
        while !self.close(b']') {
            self.byte(b',', "`,` or `]`")?;
            self.blank();
            let number = matches!(self.peek(), Some(b'-' | b'0'..=b'9'));
            self.skip()?;
            self.blank();
            match &mut found {
                Array::Numbers { count } if flat && number => *count = count.saturating_add(1),
                Array::Numbers { .. } if flat => found = Array::Other,
                _ => {}
            }
        }
        Ok(found)
    }

    /// Reads any value and forgets it.
    pub fn skip(&mut self) -> Result<(), BadJson> {
        match self.peek() {
            Some(b'{') => self.object("an object", |json, _| json.skip()),
            Some(b'[') => {
                if self.plain_array().is_some() {
                    return Ok(());
                }
                self.open(b'[', "an array")?;
                if self.close(b']') {
                    return Ok(());
                }
                loop {
                    self.skip()?;
                    self.blank();
                    if self.close(b']') {
                        return Ok(());
                    }
                    self.byte(b',', "`,` or `]`")?;
                    self.blank();
                }
            }
            Some(b'"') => self.text().map(|_| ()),
            Some(b't') => self.word(b"true"),
            Some(b'f') => self.word(b"false"),
            Some(b'n') => self.word(b"null"),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => Err(BadJson::at(self.at, "a value")),
        }
    }

    /// A string, or null.
    pub fn nullable_string(&mut self, expected: &'static str) -> Result<Option<Cow<'a, str>>, BadJson> {
        match self.peek() {
            Some(b'n') => self.word(b"null").map(|()| None),
            _ => self.string(expected).map(Some),
        }
    }

    /// A whole number that fits; the engine judges other values.
    pub fn count(&mut self) -> Result<Option<u32>, BadJson> {
        let from = self.at;
        self.skip()?;
        let text = std::str::from_utf8(&self.body[from..self.at]).ok();
        Ok(text.and_then(|t| t.parse().ok()))
    }

    /// Nothing but blanks may follow.
    pub fn end(&mut self) -> Result<(), BadJson> {
        self.blank();
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(BadJson::at(self.at, "the end")),
        }
    }

    fn open(&mut self, bracket: u8, expected: &'static str) -> Result<(), BadJson> {
        if self.depth == DEPTH_MAX {
            return Err(BadJson::at(self.at, "at most 128 levels of nesting"));
        }
        self.byte(bracket, expected)?;
        self.depth += 1;
        self.blank();
        Ok(())
    }

    fn close(&mut self, bracket: u8) -> bool {
        let closes = self.peek() == Some(bracket);
        if closes {
            self.at += 1;
            self.depth -= 1;
        }
        closes
    }

    fn byte(&mut self, byte: u8, expected: &'static str) -> Result<(), BadJson> {
        if self.peek() != Some(byte) {
            return Err(BadJson::at(self.at, expected));
        }
        self.at += 1;
        Ok(())
    }

    fn word(&mut self, word: &'static [u8]) -> Result<(), BadJson> {
        if !self.body[self.at..].starts_with(word) {
            return Err(BadJson::at(self.at, "a value"));
        }
        self.at += word.len();
        Ok(())
    }

    fn blank(&mut self) {
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    fn string(&mut self, expected: &'static str) -> Result<Cow<'a, str>, BadJson> {
        let from = self.at;
        if self.peek() != Some(b'"') {
            return Err(BadJson::at(from, expected));
        }
        let escaped = self.text()?;
        if escaped {
            // Rare and short: the decoding of escapes, surrogate pairs included, is left to serde_json.
            let text = serde_json::from_slice::<String>(&self.body[from..self.at]);
            return text.map(Cow::Owned).map_err(|_| BadJson::at(from, expected));
        }
        let raw = &self.body[from + 1..self.at - 1];
        std::str::from_utf8(raw)
            .map(Cow::Borrowed)
            .map_err(|_| BadJson::at(from, "UTF-8"))
    }

    /// Skips a string; tells whether it has escapes.
    fn text(&mut self) -> Result<bool, BadJson> {
        self.at += 1;
        let mut escaped = false;
        loop {
            let rest = &self.body[self.at..];
            let Some(n) = memchr::memchr2(b'"', b'\\', rest) else {
                return Err(BadJson::at(self.body.len(), "the end of a string"));
            };
            // A fold over bytes is vectorised; a search with an early exit is not.
            if rest[..n].iter().fold(u8::MAX, |least, &b| least.min(b)) < 0x20 {
                let bad = rest[..n].iter().position(|&b| b < 0x20).unwrap_or(0);
                return Err(BadJson::at(self.at + bad, "an escape instead of a control character"));
            }
            self.at += n + 1;
            if rest[n] == b'"' {
                return Ok(escaped);
            }
            escaped = true;
            let hex = |at: usize| self.body.get(at).is_some_and(u8::is_ascii_hexdigit);
            match self.peek() {
                Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => self.at += 1,
                Some(b'u') if (1..=4).all(|k| hex(self.at + k)) => self.at += 5,
                _ => return Err(BadJson::at(self.at, "an escape of JSON")),
            }
        }
    }

    fn number(&mut self) -> Result<(), BadJson> {
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        match self.peek() {
            Some(b'0') => {
                self.at += 1;
                if let Some(b'0'..=b'9') = self.peek() {
                    return Err(BadJson::at(self.at, "no digit after a leading 0"));
                }
            }
            _ => self.digits()?,
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.peek() {
            self.at += 1;
            if let Some(b'+' | b'-') = self.peek() {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    fn digits(&mut self) -> Result<(), BadJson> {
        let from = self.at;
        while let Some(b'0'..=b'9') = self.peek() {
            self.at += 1;
        }
        match self.at > from {
            true => Ok(()),
            false => Err(BadJson::at(self.at, "a digit")),
        }
    }

    /// The way of token ids: an array of unsigned whole numbers, written `1,2,3` or `1, 2, 3`. Anything else is left to
    /// the slow way, position unchanged.
    fn plain_array(&mut self) -> Option<u32> {
        let rest = self.body.get(self.at + 1..)?;
        // Most arrays that are not of numbers show it at once; do not search their far end.
        if self.depth == DEPTH_MAX || !rest.first()?.is_ascii_digit() {
            return None;
        }
        let inside = &rest[..memchr::memchr(b']', rest)?];
        if !plain_numbers(inside) {
            return None;
        }
        let count = memchr::memchr_iter(b',', inside).count() + 1;
        self.at += inside.len() + 2;
        Some(u32::try_from(count).unwrap_or(u32::MAX))
    }
}

/// Whether the bytes are decimal numbers without sign or leading zero, separated by `,` or `, `. One pass of byte
/// comparisons without branches, which the compiler vectorises.
fn plain_numbers(s: &[u8]) -> bool {
    let digit = |b: u8| b.wrapping_sub(b'0') < 10;
    let (Some(&first), Some(&last)) = (s.first(), s.last()) else {
        return false;
    };
    let starts_well = digit(first) && !(first == b'0' && s.get(1).is_some_and(|&b| digit(b)));
    if !starts_well || !digit(last) {
        return false;
    }
    let mut good = true;
    for (&a, &b) in s.iter().zip(&s[1..]) {
        let after_digit = digit(a) & (digit(b) | (b == b','));
        let after_comma = (a == b',') & (digit(b) | (b == b' '));
        let after_blank = (a == b' ') & digit(b);
        good &= after_digit | after_comma | after_blank;
    }
    for ((&a, &b), &c) in s.iter().zip(&s[1..]).zip(s.get(2..).unwrap_or(&[])) {
        good &= digit(a) | (b != b'0') | !digit(c);
    }
    good
}
