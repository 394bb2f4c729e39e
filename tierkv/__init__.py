"""Tiered storage for the KV cache of language-model servers."""
