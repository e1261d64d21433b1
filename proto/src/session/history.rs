//! Comparing histories: the longest common token prefix decides what is reused (F5, F17, OWN-7).

use crate::worker::api::Token;

/// Slices of this many tokens are compared as memory first.
const CHUNK: usize = 256;

/// Length of the longest common prefix, in tokens.
///
/// ```
/// use kvc_proto::session::history::common_prefix;
/// assert_eq!(common_prefix(&[1, 2, 3], &[1, 2, 4, 5]), 2);
/// ```
pub fn common_prefix(a: &[Token], b: &[Token]) -> u32 {
    let n = a.len().min(b.len());
    let (a, b) = (&a[..n], &b[..n]);
    let equal = a.chunks(CHUNK).zip(b.chunks(CHUNK)).take_while(|(x, y)| x == y).count();
    let start = (equal * CHUNK).min(n);
    let rest = a[start..].iter().zip(&b[start..]).take_while(|(x, y)| x == y).count();
    u32::try_from(start + rest).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// F17, OWN-7.
        #[test]
        fn agrees_with_the_naive_comparison(
            common in prop::collection::vec(0u32..3, 0..600), a in prop::collection::vec(0u32..3, 0..300), b in prop::collection::vec(0u32..3, 0..300),
        ) {
            let (x, y) = ([common.clone(), a].concat(), [common, b].concat());
            let naive = x.iter().zip(&y).take_while(|(p, q)| p == q).count();
            prop_assert_eq!(common_prefix(&x, &y) as usize, naive);
        }
    }
}
