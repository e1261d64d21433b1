//! Processor time of this process.

use std::fs;

/// The unit of `/proc/self/stat`, the same on every Linux.
const TICKS: f64 = 100.0;

/// Seconds that it has run so far, user and system, threads that ended included; zero where the system does not say.
pub fn seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    ticks(&stat).map_or(0.0, |ticks| ticks as f64 / TICKS)
}

/// Fields 14 and 15. The name before them may hold anything, so they are counted from its closing bracket.
fn ticks(stat: &str) -> Option<u64> {
    let (_, behind) = stat.rsplit_once(')')?;
    let mut fields = behind.split_whitespace().skip(11);
    let (user, system) = (fields.next()?, fields.next()?);
    Some(user.parse::<u64>().ok()? + system.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_and_system_time_are_found_behind_any_name() {
        let stat = "7 (a b) c) R 1 7 7 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 1 0 100 1000 10";
        assert_eq!(ticks(stat), Some(300));
        assert_eq!(ticks(""), None);
    }
}
