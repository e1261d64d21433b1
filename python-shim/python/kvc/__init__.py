"""Session KV for inference engines: the module's Python side. Importing it imports no engine and no torch."""

from kvc._native import __version__

__all__ = ["__version__"]
