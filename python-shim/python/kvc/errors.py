"""What the native module raises. Its own ABI cannot define these; it imports them from here."""

from __future__ import annotations

from kvc import _native


class Refused(Exception):
    """A typed refusal: an answer for the client, not a fault. Its text begins with the reason code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.status: int = _native.status_of(code)

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class ConfigurationError(ValueError):
    """Settings or an engine that the module cannot run with; one line that says how to fix it."""
