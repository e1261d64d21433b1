"""What a session's KV depends on besides its token ids, as one text (SES-5), and the engine's extra key made from it.

The engine's own extra key is the client's salt with the adapter's id behind it; the length in front keeps two such
pairs apart.
"""

from __future__ import annotations


def identity_of(salt: str | None, lora_id: str | None) -> str:
    """The text for a request; empty without salt and adapter.

    >>> identity_of("a", "bc") == identity_of("ab", "c")
    False
    """
    if not salt and not lora_id:
        return ""
    return f"{len(salt or '')}:{salt or ''}{lora_id or ''}"


def extra_key_of(identity: str) -> str | None:
    """The engine's extra key of an identity, for its prefix tree.

    >>> extra_key_of(identity_of("pepper", None))
    'pepper'
    >>> extra_key_of("") is None
    True
    """
    return identity.partition(":")[2] or None
