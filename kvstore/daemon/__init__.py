"""The daemon: composition root and life. The only package that names concrete tiers."""

from kvstore.daemon.daemon import Daemon, serve

__all__ = ["Daemon", "serve"]
