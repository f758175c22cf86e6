"""`Crowd`: several engines and an operator at one daemon at once, all doing what they may."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from typing import Any

import msgspec
from daemons import SPEC, DaemonProcess, Tagged

from kvstore.client import KVClient, KVStoreError, LeaseLost, ReuseHints
from kvstore.core.errors import LimitReached, NotFound

TENANTS = ("default", "chat")
# A block is 128 tokens, one grain of the statistics, and 16 KiB.
BLOCK = 128
WIDE = msgspec.structs.replace(SPEC, block_bytes=0, block_size=BLOCK, num_layers=1, num_kv_heads=1,
                               head_dim=16)  # fmt: skip
CHATS, BLOCKS_MAX = 60, 40
OPERATOR_TURNS_MIN = 16  # two whole rounds of `meddle`, however soon the engines end


class Crowd:
    """Clients in threads of their own; `steps` are requests of each."""

    def __init__(self, daemon: DaemonProcess, seed: int, clients: int = 4, steps: int = 60) -> None:
        self.daemon, self.seed, self.clients, self.steps = daemon, seed, clients, steps
        self.restored = self.wrong = 0
        self._lock = threading.Lock()

    def run(self, operator: Any = None) -> None:
        """Runs all clients to their end, and `operator(client, random)` again and again beside."""
        over = threading.Event()
        with ThreadPoolExecutor(self.clients + 1) as pool:
            engines = [pool.submit(self._engine, n) for n in range(self.clients)]
            watching = pool.submit(self._operate, operator, over) if operator else None
            try:
                for engine in engines:
                    engine.result()
            finally:
                over.set()
            if watching is not None:
                watching.result()

    def _operate(self, operator: Any, over: threading.Event) -> None:
        random = Random(self.seed)
        with self.daemon.client(call_timeout_seconds=10.0) as client:
            turns = 0
            while not over.wait(0.03) or turns < OPERATOR_TURNS_MIN:
                turns += 1
                with suppress(NotFound, LimitReached):  # what it meant is gone already
                    operator(client, random)

    def _engine(self, number: int) -> None:
        random = Random(100 * self.seed + number)
        with self.daemon.client(call_timeout_seconds=20.0) as client:
            spaces = {tenant: client.attach(WIDE, tenant=tenant) for tenant in TENANTS}
            # Blocks of each tenant have bytes of their own; who makes them is for one thread.
            tagged = {tenant: Tagged(WIDE, tenant) for tenant in TENANTS}
            for step in range(self.steps):
                tenant = random.choice(TENANTS)
                self._request(spaces[tenant], tagged[tenant], f"{number}-{step}", random)

    def _request(self, space: Any, tagged: Tagged, request_id: str, random: Random) -> None:
        chat, blocks = random.randrange(CHATS), random.randrange(1, BLOCKS_MAX)
        tokens = prompt(chat, blocks)
        named = request_id if random.random() < 0.9 else None
        hints = ReuseHints(
            session=f"chat {chat}", expect_reuse=random.randrange(4), priority=random.randrange(3)
        )
        try:
            with space.lookup(tokens, request_id=named, hints=hints) as match:
                if match.block_count and random.random() < 0.8:
                    self._restore(space, tagged, match, tokens)
                first = match.matched_tokens // BLOCK
            payload = tagged.blocks(tokens)
            if random.random() < 0.9:
                space.put(tokens, payload[first:], first, request_id=named, hints=hints)
            if named and random.random() < 0.8:
                space.finish_request(named, random.randrange(800), hints=hints)
            if random.random() < 0.3:
                self._report(space, random)
        except (LeaseLost, NotFound, LimitReached):
            pass  # an operator was quicker

    def _restore(self, space: Any, tagged: Tagged, match: Any, tokens: list[int]) -> None:
        views = [bytes(view) for view in space.restore(match)]
        match.check()
        wrong = tagged.wrong(tokens, views)
        with self._lock:
            self.restored += len(views)
            self.wrong += wrong

    def _report(self, space: Any, random: Random) -> None:
        new, cached = random.choice((128, 512, 2048, 8192)), random.choice((0, 1024, 8192))
        space.report_step(1e-3 + new * 1e-5 + new * (cached + new / 2) * 1e-10, [(new, cached)])
        space.report_transfer("host>hbm", 1 << 24, 2e-3)


def prompt(chat: int, blocks: int) -> list[int]:
    """The beginning of a chat; every third shares its first blocks with others."""
    tokens: list[int] = []
    for n in range(blocks):
        owner = 0 if chat % 3 == 0 and n < 4 else chat
        tokens += [10_000 * owner + 100 * n + 7] * BLOCK
    return tokens


def meddle(policies: tuple[str, ...]) -> Any:
    """An operator who pins, sets quotas and policies, clears and flushes, by turns."""
    turn = 0

    def operate(client: KVClient, random: Random) -> None:
        nonlocal turn
        turn += 1
        admin = client.admin
        what = turn % 8
        if what == 1:
            admin.set_quota("chat", "host", cap_bytes=random.choice((4, 8, 0)) << 20)
        elif what == 2 and len(policies) > 1:
            admin.set_policy(policies[turn // 8 % len(policies)])
        elif what == 3:
            space = client.attach(WIDE)
            with space.lookup(prompt(1, 8), request_id=f"pin-{turn}") as match:
                if match.matched_tokens:
                    admin.pin(request_id=f"pin-{turn}", ttl_seconds=0.2)
        elif what == 4:
            admin.flush()
        elif what == 5:
            spaces = admin.status(with_spaces=True).spaces
            filled = [space for space in spaces if space.block_count] or spaces
            admin.clear(space_id=random.choice(filled).space_id)
        elif what == 6:
            with suppress(KVStoreError):
                admin.set_policy("no such policy")

    return operate
