"""Tiered KV-cache storage daemon for LLM inference. Imports nothing: every part runs this first."""

__version__ = "0.1.0"
