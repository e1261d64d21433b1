//! Processor time of this process and of those it started.

use std::fs;

/// The unit of `/proc/self/stat`, the same on every Linux.
const TICKS: f64 = 100.0;

/// Seconds that it has run so far, user and system, threads that ended included; zero where the system does not say.
pub fn seconds() -> f64 {
    fields(11)
}

/// Of the processes it started and waited for.
pub fn of_children() -> f64 {
    fields(13)
}

fn fields(at: usize) -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    ticks(&stat, at).map_or(0.0, |ticks| ticks as f64 / TICKS)
}

/// Two fields behind the name: user and system time are fields 14 and 15, those of children the next two. The name may hold
/// anything, so they are counted from its closing bracket.
fn ticks(stat: &str, at: usize) -> Option<u64> {
    let (_, behind) = stat.rsplit_once(')')?;
    let mut fields = behind.split_whitespace().skip(at);
    let (user, system) = (fields.next()?, fields.next()?);
    user.parse::<u64>().ok()?.checked_add(system.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_and_system_time_are_found_behind_any_name() {
        let stat = "7 (a b) c) R 1 7 7 0 -1 4194304 100 0 0 0 250 50 30 4 20 0 1 0 100 1000 10";
        assert_eq!((ticks(stat, 11), ticks(stat, 13)), (Some(300), Some(34)));
        assert_eq!(ticks("", 11), None);
    }
}
