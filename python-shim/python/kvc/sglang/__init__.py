"""Adapter for SGLang 0.5.10.post1: engine objects become ids, lengths, pointers and page lists; Rust decides.

`hooks` is what the patched scheduler calls, `cache` what it holds as its prefix cache, `http` what its HTTP server
calls, `args` its flags, `cpu` and `testing` what only runs without a GPU or in tests. `patch` puts the call-outs in.
Importing this package imports no SGLang.
"""
