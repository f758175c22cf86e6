"""Hidden words: SipHash-2-4, many at a time."""

from __future__ import annotations

import numpy as np

from kvstore.core.hiding import hidden_words

KEY = bytes(range(16))


def test_the_published_value() -> None:
    """The reference implementation's vector for a message of eight bytes."""
    words = np.frombuffer(bytes(range(8)), np.uint64)
    assert hidden_words(KEY, words).tobytes().hex() == "6224939a79f5f593"


def test_equal_words_stay_equal_and_others_do_not() -> None:
    """What is equal stays so under one key, and has nothing in common under another."""
    words = np.arange(20_000, dtype=np.uint64)
    hidden = hidden_words(KEY, np.concatenate([words, words]))
    assert (hidden[: len(words)] == hidden[len(words) :]).all()
    assert len(np.unique(hidden)) == len(words)
    assert not np.isin(hidden_words(bytes(16), words), hidden).any()
    assert not np.isin(hidden, words).any()
    bits = np.unpackbits(hidden[: len(words)].view(np.uint8)).reshape(-1, 64).mean(axis=0)
    assert abs(bits - 0.5).max() < 0.02, "each bit is set half of the time"


def test_nothing_is_hidden_as_nothing() -> None:
    """No words give no words."""
    assert not len(hidden_words(KEY, np.empty(0, np.uint64)))
