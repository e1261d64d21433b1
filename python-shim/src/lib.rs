//! python-shim
