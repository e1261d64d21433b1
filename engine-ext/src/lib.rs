//! engine-ext
