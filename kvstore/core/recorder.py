"""`Recorder`: what the parts tell about themselves; this one forgets, `kvstore.metrics` counts.

One thread, the owner's, calls it; each call is cheap enough for every request.
"""

from __future__ import annotations

DEMOTION_SKIPS = ("worth", "endurance", "queue", "quota", "room", "degraded", "failed")
"""Why a block was not written to disk: its copy would save less than the write costs, the writes
of the day are used up, the link's queue is full, its tenant's cap, no slot to be had, the tier
has a problem, the write failed."""
RESTORE_FAILURES = ("corrupt", "failed", "timeout", "late", "queue", "room", "lost")
"""Why a block on disk did not come to host memory: wrong bytes, a failed read, one
that did not end in time, a restore so far behind its plan that recomputing is faster, the link's
queue is full, no room in the host tier, its lease ended meanwhile."""

SHADOW_RESTARTS = ("overflow", "idle", "policy", "clear", "space", "capacity")
"""Why shadows start anew: more to follow than there is time for, time to spare for a larger sample,
another policy, spaces cleared, a space with smaller blocks."""
POLICY_SWITCHES = ("operator", "guard", "recovery")
"""Why another policy acts: it was set; shadows show it to save more; the configured one is as good
again."""


class Recorder:
    """Does nothing with what it is told: the default of every part that takes a recorder."""

    def rpc(self, method: str, status: str, seconds: float | None = None) -> None:
        """One call was answered with a gRPC status name, over any transport.

        `seconds` is what its handler took of the owner thread, where that was measured.
        """

    def lookup(self, result: str, tokens: int, hit_tokens: int, tier: str = "host") -> None:
        """One lookup of `tokens` tokens found the first `hit_tokens` in `tier`.

        `result` is `hit` (every full block), `partial` or `miss`. Tokens that further tiers add to
        the same prefix are told with `hit`. `seconds` is what it took, where that was measured.
        """

    def hit(self, tier: str, tokens: int) -> None:
        """A lookup's prefix goes on for `tokens` tokens in another tier."""

    def restored(self, tier: str, byte_count: int) -> None:
        """Payload bytes were handed to a client to restore from."""

    def put_blocks(self, outcome: str, count: int) -> None:
        """Blocks of a put were `stored`, `present`, `pending` or `rejected`."""

    def put_bytes(self, count: int) -> None:
        """Payload bytes became READY."""

    def copied(self, link: str, byte_count: int, seconds: float) -> None:
        """One copy over `link` (`staging>host`) ended after `seconds`, queueing left out."""

    def queue_rejected(self, link: str, blocks: int = 1) -> None:
        """Blocks found the queue of `link` full and were skipped."""

    def evicted(self, tier: str, reason: str, blocks: int, byte_count: int) -> None:
        """Blocks left `tier` to make room (`capacity`, `quota`) or by order (`clear`, ...)."""

    def demoted(self, blocks: int, byte_count: int) -> None:
        """Blocks of the host tier were written to disk, durably."""

    def demotion_skipped(self, reason: str, blocks: int) -> None:
        """Blocks that were due for the disk were not written; see DEMOTION_SKIPS for reasons."""

    def promoted(self, blocks: int, byte_count: int) -> None:
        """Blocks were read from disk, found good, and are READY in the host tier."""

    def hbm_promoted(self, blocks: int, byte_count: int) -> None:
        """Blocks of the host tier have copies in the memory of a GPU now."""

    def hbm_loaded(self, blocks: int) -> None:
        """Engines were given blocks in the memory of a GPU."""

    def restore_failed(self, reason: str, blocks: int) -> None:
        """Blocks of a Restore could not be had; see RESTORE_FAILURES for reasons."""

    def planned(self, kind: str, measured: bool) -> None:
        """A lookup was answered with a plan of this kind, by measured costs or for want of them."""

    def plan_ended(self, kind: str, predicted: float, measured: float, regret: float) -> None:
        """Seconds to the first token of a plan that was carried out, and what others would have
        spared.
        """

    def deadline_missed(self, predicted: bool) -> None:
        """A request's deadline was missed, or will be by any plan if it was `predicted`."""

    def set_cost(
        self, subject: str, fitted: bool, sample_count: int, ratio_p50: float, ratio_p99: float
    ) -> None:
        """A cost model now: its state, and measured over predicted seconds."""

    def corrupt(self, tier: str, blocks: int = 1) -> None:
        """Blocks did not match their checksum and became misses."""

    def readopted(self, tier: str, blocks: int) -> None:
        """Blocks of an earlier daemon were found good at the start."""

    def limit_rejected(self, limit: str) -> None:
        """A request met the limit that the key `limits.<limit>` sets."""

    def reservation_expired(self, count: int = 1) -> None:
        """Reservations were given up by their time to live or their client's death."""

    def lease_ended(self, reason: str, count: int = 1) -> None:
        """Leases ended by `release`, `finish`, `expiry`, `death`, `replaced` or `lost`."""

    def events_dropped(self, count: int) -> None:
        """Events left the buffer before a subscriber read them."""

    def shadow_request(self, outcome: str) -> None:
        """A sampled request was `followed` by the shadows, or `skipped` while they start anew."""

    def shadow_tokens(self, tokens: float) -> None:
        """Prompts of so many tokens in all were followed, or are stood for."""

    def shadow_served(
        self, policy: str, tier: str, capacity: str, hit_tokens: float, seconds: float
    ) -> None:
        """A shadow hit so many of these tokens, which saves so many seconds of prefill."""

    def set_shadow(
        self, policy: str, tier: str, capacity: str, hit_ratio: float, per_second: float
    ) -> None:
        """A shadow's hits and saved seconds a second over the last requests."""

    def set_shadow_share(self, share: float) -> None:
        """The share of conversations that shadows follow."""

    def shadow_restarted(self, reason: str) -> None:
        """The shadows started anew; see SHADOW_RESTARTS for reasons."""

    def policy_switched(self, reason: str) -> None:
        """Another policy acts; see POLICY_SWITCHES for reasons."""

    def set_policy_guarded(self, guarded: bool) -> None:
        """Whether another policy acts than the one that is configured."""

    def loop_stall(self, seconds: float) -> None:
        """The owner thread was late for its own timer by `seconds`."""

    def set_sessions(self, session_count: int, space_count: int) -> None:
        """Sessions open and spaces known now."""

    def set_leases(
        self, lease_count: int, leased_bytes: int, pinned_bytes: int, reserved_bytes: int
    ) -> None:
        """Leases held now, and the bytes that leases, pins and reservations hold."""

    def set_index(self, block_count: int, run_count: int) -> None:
        """Blocks and runs in the prefix index now."""

    def set_tier(
        self, tier: str, capacity: int, used: int, free: int, resting: int, block_count: int
    ) -> None:
        """A tier's bytes now: used + free + resting == capacity; and its READY blocks."""

    def set_tier_degraded(self, tier: str, degraded: bool) -> None:
        """Whether a tier has a problem now, and takes no blocks."""

    def set_queue(self, link: str, byte_count: int) -> None:
        """Bytes that wait for or run over `link` now."""


NO_RECORDER = Recorder()
