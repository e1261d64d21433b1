//! Why settings are no [`Config`](super::Config): each is one line with the field, the fact and the fix.

use std::{fmt, path::PathBuf};

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// The TOML file.
    File(PathBuf),
    /// An environment variable.
    Environment(String),
    /// A flag.
    Flag(String),
}

/// What is wrong with the settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file names a key, or a flag was given, that does not exist.
    #[error("{key} ({origin}) is no setting; the settings are {known}")]
    Unknown {
        /// As given.
        key: String,
        /// By whom.
        origin: Origin,
        /// All names.
        known: String,
    },
    /// A value cannot be used.
    #[error("{field} ({origin}) is {got:?}: give {limit}")]
    Value {
        /// Which key.
        field: &'static str,
        /// By whom.
        origin: Origin,
        /// As given.
        got: String,
        /// What would be right.
        limit: String,
    },
    /// A file cannot be read or understood.
    #[error("{field} ({origin}): {path:?}: {fault}")]
    File {
        /// Which key names the file.
        field: &'static str,
        /// By whom.
        origin: Origin,
        /// Which file.
        path: String,
        /// What is wrong and what to do.
        fault: String,
    },
    /// Two settings contradict each other.
    #[error("{field}: {fact}: {fix}")]
    Conflict {
        /// One of them.
        field: &'static str,
        /// How.
        fact: String,
        /// What to do.
        fix: &'static str,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            // Escaped: whatever the names hold, the error stays one line.
            Origin::File(path) => write!(f, "file {}", path.to_string_lossy().escape_debug()),
            Origin::Environment(name) => write!(f, "environment {}", name.escape_debug()),
            Origin::Flag(name) => write!(f, "flag {}", name.escape_debug()),
        }
    }
}
