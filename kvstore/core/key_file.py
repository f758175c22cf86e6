"""Keys of an encrypted disk tier, read from a file that nobody else can read.

A line is a name and a key, 32 bytes in hexadecimal or base64; `#` begins a comment. The first key
is the one to write with, all of them are there to read. Nothing here shows a key in an error.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import re
import stat
from pathlib import Path

from kvstore.core.errors import ConfigError

KEY_BYTES = 32
KEYS_MAX = 64
FILE_BYTES_MAX = 64 << 10
SETTING = "tiers.disk.key_file"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,32}")
_KEY_ID_LABEL = b"kvstore disk key id"


class DiskKey:
    """A key with its name; `key_id` follows from its bytes, and is what records on disk carry."""

    def __init__(self, name: str, secret: bytes) -> None:
        self.name, self.secret = name, secret
        # 0 stands for "not encrypted" on disk.
        digest = hmac.digest(secret, _KEY_ID_LABEL, "sha256")
        self.key_id = int.from_bytes(digest[:4], "little") or 1

    def __repr__(self) -> str:
        return f"DiskKey({self.name}, {self.key_id:08x})"


def read_key_file(path: str | Path) -> list[DiskKey]:
    """The keys of a file, that to write with first; raises ConfigError."""
    where = f"{SETTING} {path}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"{where} cannot be read ({error.strerror}); correct the path or make the file"
        ) from error
    try:
        _check_private(os.fstat(fd), where, path)
        raw = os.read(fd, FILE_BYTES_MAX + 1)
    finally:
        os.close(fd)
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(f"{where} has more than {FILE_BYTES_MAX} bytes; it is no file of keys")
    return parse_keys(raw, where)


def _check_private(status: os.stat_result, where: str, path: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{where} is no file; name a file of keys")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{where} belongs to user {status.st_uid}, who knows the keys then; run: "
            f"chown {os.geteuid()} {path}"
        )
    if status.st_mode & 0o077:
        raise ConfigError(
            f"{where} has mode {stat.S_IMODE(status.st_mode):04o}, others can read it; run: "
            f"chmod 600 {path}"
        )


def parse_keys(raw: bytes, where: str) -> list[DiskKey]:
    """The keys of a file's bytes; raises ConfigError that begins with `where`."""
    keys: list[DiskKey] = []
    for number, line in enumerate(raw.split(b"\n"), 1):
        words = line.split(b"#")[0].decode("utf-8", "replace").split()
        if words:
            keys.append(_parse_line(words, f"{where}: line {number}"))
    if not keys:
        raise ConfigError(f"{where} holds no key; add one with: echo NAME $(openssl rand -hex 32)")
    if len(keys) > KEYS_MAX:
        raise ConfigError(f"{where} holds {len(keys)} keys; keep {KEYS_MAX} at most")
    for what, values in (("name", [k.name for k in keys]), ("key", [k.key_id for k in keys])):
        if len(set(values)) < len(values):
            raise ConfigError(f"{where} holds the same {what} twice; remove one of the lines")
    return keys


def _parse_line(words: list[str], where: str) -> DiskKey:
    if len(words) != 2 or not _NAME.fullmatch(words[0]):
        raise ConfigError(
            f"{where} is not a name and a key; write NAME, a space, and 32 bytes in hexadecimal "
            "or base64"
        )
    name, text = words
    secret = _decode(text)
    if secret is None:
        raise ConfigError(
            f"{where}: the key of {name} is not {KEY_BYTES} bytes in hexadecimal or base64; make "
            "one with: openssl rand -hex 32"
        )
    return DiskKey(name, secret)


def _decode(text: str) -> bytes | None:
    try:
        if len(text) == 2 * KEY_BYTES:
            return bytes.fromhex(text)
        secret = base64.b64decode(text.translate(str.maketrans("-_", "+/")), validate=True)
    except (ValueError, binascii.Error):
        return None
    return secret if len(secret) == KEY_BYTES else None
