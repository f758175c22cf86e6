"""`Access`: which role and tenants a peer gets, by the `[[access]]` rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvstore.core.errors import Unauthenticated
from kvstore.store.sessions import Identity

ROOT_UID = 0
DEFAULT_TENANT = "default"


class Rule(Protocol):
    """A rule as the configuration has it: one of uid, gid and certificate is set."""

    @property
    def uid(self) -> int | None: ...
    @property
    def gid(self) -> int | None: ...
    @property
    def certificate(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def role(self) -> str: ...


class Grant(NamedTuple):
    """What an identity may do: a role, and the tenants it may attach to."""

    role: str
    tenants: frozenset[str]


class Access:
    """Rules in order; the first that fits names the peer and its role.

    Later rules for the very same peer (same uid, gid or certificate) add their tenants. Without
    any rule, the daemon's own user and root are admins of the tenant `default`.
    """

    def __init__(self, rules: Iterable[Rule], daemon_uid: int) -> None:
        self._rules = tuple(rules)
        self._own = frozenset((daemon_uid, ROOT_UID))

    def grant(self, identity: Identity, groups: Sequence[int] = ()) -> Grant:
        """Role and tenants of `identity`, whose supplementary groups are `groups`.

        Raises Unauthenticated if no rule fits.
        """
        if not self._rules and identity.uid in self._own:
            return Grant("admin", frozenset((DEFAULT_TENANT,)))
        fitting = [rule for rule in self._rules if _fits(rule, identity, groups)]
        if not fitting:
            raise Unauthenticated(
                f"{describe(identity)} has no access; ask the operator for an [[access]] rule"
            )
        first = fitting[0]
        same = [rule for rule in fitting if _selector(rule) == _selector(first)]
        return Grant(first.role, frozenset(rule.tenant for rule in same))


def _fits(rule: Rule, identity: Identity, groups: Sequence[int]) -> bool:
    if rule.uid is not None:
        return rule.uid == identity.uid
    if rule.gid is not None:
        return rule.gid == identity.gid or rule.gid in groups
    return bool(rule.certificate) and rule.certificate == identity.certificate


def _selector(rule: Rule) -> tuple[int | None, int | None, str]:
    return rule.uid, rule.gid, rule.certificate


def describe(identity: Identity) -> str:
    """For people: `uid 1001` or `certificate 'engine-7'`."""
    if identity.certificate:
        return f"certificate {identity.certificate!r}"
    return f"uid {identity.uid}" if identity.uid is not None else "a peer without an identity"
