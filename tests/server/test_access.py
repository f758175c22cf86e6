"""Access rules: who a peer is decides its role and tenants."""

from __future__ import annotations

import pytest

from kvstore.core.config import AccessRule
from kvstore.core.errors import Unauthenticated
from kvstore.server.access import Access
from kvstore.store.sessions import Identity

DAEMON_UID = 500


def test_own_user_and_root_are_admins_without_rules() -> None:
    """Without rules the daemon's own user and root administer the tenant `default`."""
    access = Access((), DAEMON_UID)
    for uid in (DAEMON_UID, 0):
        assert access.grant(Identity(uid=uid, gid=9)) == ("admin", {"default"})


@pytest.mark.parametrize(
    "identity", [Identity(uid=501, gid=500), Identity(certificate="engine-1"), Identity()]
)
def test_strangers_are_refused(identity: Identity) -> None:
    """I18: an identity that no rule fits gets UNAUTHENTICATED, rules or none."""
    for rules in ((), (AccessRule(uid=1, tenant="secret-tenant"),)):
        with pytest.raises(Unauthenticated) as caught:
            Access(rules, DAEMON_UID).grant(identity)
        assert "secret" not in str(caught.value)


def test_rules_replace_the_default() -> None:
    """With rules, the daemon's own user is nobody special."""
    access = Access((AccessRule(uid=1),), DAEMON_UID)
    with pytest.raises(Unauthenticated):
        access.grant(Identity(uid=DAEMON_UID, gid=0))


def test_first_rule_that_fits_counts() -> None:
    """A rule for one user before one for its group restricts that user."""
    access = Access(
        (
            AccessRule(uid=7, tenant="a", role="engine"),
            AccessRule(gid=70, tenant="b", role="admin"),
        ),
        DAEMON_UID,
    )
    assert access.grant(Identity(uid=7, gid=70)) == ("engine", {"a"})
    assert access.grant(Identity(uid=8, gid=70)) == ("admin", {"b"})


def test_rules_for_one_peer_add_tenants() -> None:
    """Several rules for the very same peer give all of their tenants, the first one's role."""
    access = Access(
        (
            AccessRule(certificate="gateway", tenant="a"),
            AccessRule(uid=7, tenant="x"),
            AccessRule(certificate="gateway", tenant="b", role="admin"),
        ),
        DAEMON_UID,
    )
    assert access.grant(Identity(certificate="gateway")) == ("engine", {"a", "b"})


def test_supplementary_groups_count() -> None:
    """A group rule fits members by any of their groups."""
    access = Access((AccessRule(gid=70, tenant="t"),), DAEMON_UID)
    assert access.grant(Identity(uid=9, gid=9), groups=(1, 70)).tenants == {"t"}


def test_certificate_and_uid_never_stand_for_each_other() -> None:
    """I18: a peer without a certificate fits no certificate rule, and the other way round."""
    access = Access((AccessRule(certificate="engine"), AccessRule(uid=3)), DAEMON_UID)
    with pytest.raises(Unauthenticated):
        access.grant(Identity(uid=4, gid=4))
    with pytest.raises(Unauthenticated):
        access.grant(Identity(certificate="3"))
