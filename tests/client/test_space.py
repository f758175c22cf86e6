"""What a `Space` says of itself."""

from __future__ import annotations

from kvstore.core.spec import space_id
from kvstore.testing import InProcessStore


def test_a_space_tells_its_identity_and_epoch(spec):
    """Engines can tell blocks of one epoch from those of another after each attach."""
    with InProcessStore() as store:
        client = store.client()
        space = client.attach(spec)
        assert (space.space_id, space.epoch) == (space_id(spec, "default"), 0)
        client.admin.bump_epoch(space.space_id)
        assert client.attach(spec).epoch == 1
