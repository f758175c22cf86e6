"""The console: pages that show a running daemon in a browser; they read and change nothing."""

from kvstore.console.console import Console

__all__ = ["Console"]
