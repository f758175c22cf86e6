"""A daemon's status as plain values, over a connection that stays."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from kvstore.client import KVClient
