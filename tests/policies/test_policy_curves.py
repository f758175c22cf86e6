"""The turn-reuse index: its tables, its units, its directory and what hints do to it."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from kvstore.policies import reuse_model
from kvstore.policies.reuse_curves import AGES, BINS, index_table
from kvstore.policies.reuse_model import ReuseModel
from kvstore.policies.uses import UNKNOWN_TOKENS, Hint, Request, Use


def told(model: ReuseModel, number: int, seconds: float, digests: list[int], **more: object) -> Use:
    """What a model makes of a request."""
    values = {"tenant": "t", "input_tokens": 512 * len(digests), "output_tokens": 100, **more}
    packed = array("Q", digests).tobytes()
    request = Request(seconds=seconds, digests=packed, **values)  # type: ignore[arg-type]
    use = Use(number, request)
    model.on_request(use, request)
    return use


@pytest.mark.parametrize(
    ("chances", "bins", "expected"),
    [
        (
            [0.1] * BINS,
            [0, 1, 5, 10, 15, 20, 22],
            [1.052632e-1, 4.210526e-2, 2.105263e-2, 3.508772e-3, 8.771930e-4, 2.105263e-4,
             3.508772e-5],
        ),
        (
            list(np.linspace(0.01, 0.2, BINS)),
            [0, 1, 5, 10, 15, 20, 22],
            [1.005025e-2, 9.600584e-3, 1.092692e-2, 3.374721e-3, 1.250102e-3, 4.022011e-4,
             7.407407e-5],
        ),
        (
            [0.3, 0.2, 0.05] + [0.02] * (BINS - 3),
            [0, 1, 2, 3, 10, 22],
            [3.529412e-1, 8.888889e-2, 1.709402e-2, 5.772006e-3, 6.734007e-4, 6.734007e-6],
        ),
    ],
)  # fmt: skip
def test_the_index_of_known_chances(
    chances: list[float], bins: list[int], expected: list[float]
) -> None:
    """The index is the best reuse per second over horizons, worked out by hand for these."""
    table = index_table(np.array([chances, chances]))
    assert table[0, bins] == pytest.approx(expected, rel=1e-6)
    assert (table[0] == table[1]).all()


def test_the_index_agrees_with_its_definition() -> None:
    """For chances drawn at random, the table is the maximum over end bins, summed one by one."""
    rng = random.Random(3)
    chances = [[rng.random() * 0.5 for _ in range(BINS)] for _ in range(5)]
    table = index_table(np.array(chances))
    widths = np.diff([*AGES, 6000.0])
    for row, row_chances in enumerate(chances):
        for start in range(BINS):
            alive, gain, wait, best = 1.0, 0.0, 0.0, 0.0
            for end in range(start, BINS):
                gain += alive * row_chances[end]
                wait += alive * widths[end] * (1 - row_chances[end] / 2)
                alive *= 1 - row_chances[end]
                best = max(best, gain / wait)
            assert table[row, start] == pytest.approx(best)


def test_a_conversation_is_followed_turn_by_turn() -> None:
    """A request that goes on from another one's blocks is its next turn, and knows them."""
    model = ReuseModel()
    first = told(model, 0, 0.0, [1, 2, 3])
    second = told(model, 1, 60.0, [1, 2, 3, 4])
    assert (first.known, second.known) == (0, 3)
    assert [turn for turn, _, _ in model._turns] == [1, 2]
    told(model, 2, 61.0, [9, 10])
    assert [turn for turn, _, _ in model._turns] == [1, 2, 1]


def test_a_system_prompt_makes_no_conversation() -> None:
    """Blocks from which many requests part ways do not count as an earlier turn."""
    model = ReuseModel()
    for number in range(12):
        told(model, number, float(number), [1, 2, 100 + number])
    turns = [turn for turn, _, _ in model._turns]
    assert turns[1] == 2, "the second request cannot be told from a regenerated one"
    assert turns[-1] == 1


def test_exposure_counts_each_block_once_in_each_bin() -> None:
    """Batches and what comes between them add up to a count made request by request."""
    rng, model = random.Random(5), ReuseModel()
    now, chats, number = 0.0, [[n] for n in range(1, 6)], 0
    units: list[list[float]] = []  # time, alive, weight
    where: dict[int, int] = {}
    exposed = [0.0] * BINS
    passed: list[int] = []
    fresh = iter(range(100, 10_000))
    model._rebuild = lambda: model.units.age(model.now)  # type: ignore[method-assign]
    for number in range(400):
        now += rng.expovariate(0.2)
        chat = rng.choice(chats)
        chat.extend(next(fresh) for _ in range(rng.randrange(0, 4)))
        for i, unit in enumerate(units):
            while passed[i] + 1 < BINS and now - unit[0] >= AGES[passed[i] + 1]:
                passed[i] += 1
                exposed[passed[i]] += unit[1] * unit[2]
        known = [digest for digest in chat if digest in where]
        for digest in known:
            units[where[digest]][1] -= 1
        for part in (known, chat[len(known) :]):
            weight = len(part) ** -0.5 if part else 0.0
            exposed[0] += len(part) * weight
            where.update(dict.fromkeys(part, len(units)))
            units.append([now, len(part), weight])
            passed.append(0)
        told(model, number, now, chat)
    for i, unit in enumerate(units):
        while passed[i] + 1 < BINS and now - unit[0] >= AGES[passed[i] + 1]:
            passed[i] += 1
            exposed[passed[i]] += unit[1] * unit[2]
    model.units.age(now)
    # Nothing was rebuilt, so every factor is 1 and exposure is what was counted.
    assert model.curves.exposure.sum(0) == pytest.approx(exposed)


def test_the_directory_outlives_eviction_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are known for as long as curves reach, or until there are too many of them."""
    model = ReuseModel()
    told(model, 0, 0.0, [1, 2])
    for number in range(1, 200):
        told(model, number, 25.0 * number, [10 * number])
    assert told(model, 200, 5_000.0, [1, 2, 3]).known == 2
    for number in range(201, 600):
        told(model, number, 5_000.0 + 50.0 * (number - 200), [10 * number])
    assert told(model, 600, 26_000.0, [1, 2, 3]).known == 0
    monkeypatch.setattr(reuse_model, "DIRECTORY_BLOCKS_MAX", 50)
    for number in range(601, 800):
        told(model, number, 26_000.0 + number, [10 * number])
    assert model.block_count <= 50 + 50


def test_a_late_output_length_gives_the_request_its_shape() -> None:
    """A request whose output is known only at its end is ranked like one that said it at once."""
    model, other = ReuseModel(), ReuseModel()
    early = told(model, 0, 0.0, [1, 2], output_tokens=900)
    late = told(other, 0, 0.0, [1, 2], output_tokens=-1)
    assert late.rows != early.rows
    other.on_finish(late, 900)
    assert late.rows == early.rows


def play(model: ReuseModel, truth: float, tenant: str, seed: int, start: float) -> None:
    """Conversations of one tenant whose hints are right with probability `truth`."""
    rng = random.Random(seed)
    digest = seed << 32
    for number in range(600):
        goes_on = rng.random() < 0.4
        hint = goes_on if rng.random() < truth else not goes_on
        digest += 2
        now = start + 10.0 * number
        told(model, model._requests, now, [digest], tenant=tenant,
             expect_reuse="likely" if hint else "none")  # fmt: skip
        if goes_on:
            told(model, model._requests, now + 5, [digest, digest + 1], tenant=tenant,
                 expect_reuse="none")  # fmt: skip


def test_a_hint_moves_the_curves_as_far_as_it_is_true() -> None:
    """Blocks with a true hint rank far apart; with a hint that is noise they do not."""
    ratios = []
    for truth in (1.0, 0.5):
        model = ReuseModel()
        play(model, truth, "t", 1, 0.0)
        now, base = 6_000.0, []
        for hint in ("likely", "none"):
            use = told(model, model._requests, now, [hash(hint) & 0xFFFF], expect_reuse=hint)
            base.append(model.index(use.rows[1], 0.0))
        ratios.append(base[0] / base[1])
    assert ratios[0] > 4
    assert 0.5 < ratios[1] < 2


def test_a_tenant_that_lies_is_believed_less() -> None:
    """Each tenant's hints have a factor of their own, and a lie costs only its own."""
    model = ReuseModel()
    play(model, 1.0, "honest", 1, 0.0)
    play(model, 0.0, "liar", 2, 6_000.0)
    likely = 2
    assert model.hints.belief("liar", likely) < 0.5 * model.hints.belief("honest", likely)


def test_priorities_count_within_a_tenant_only() -> None:
    """A high priority lifts a request among its tenant's; given to all of them it is none."""
    model = ReuseModel()
    assert told(model, 0, 0.0, [1], priority=2).weight == 4.0
    uses = [told(model, n, float(n), [10 + n], priority=2, tenant="t") for n in range(1, 600)]
    assert uses[-1].weight == pytest.approx(1.0, abs=0.02)
    assert told(model, 600, 600.0, [3], tenant="other").weight == 1.0
    assert told(model, 601, 601.0, [4], tenant="t").weight < 0.5


def test_ends_are_told_of_the_right_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """After old requests were forgotten an output length still reshapes the one it is of."""
    monkeypatch.setattr(reuse_model, "REQUESTS_MAX", 60)
    model, uses = ReuseModel(), []
    for n in range(200):
        uses.append(told(model, n, float(n), [n], output_tokens=UNKNOWN_TOKENS))
    assert len(model._turns) < 120, "nothing was forgotten"
    newest, units = uses[-1], model.units
    before = list(units._shapes)
    model.on_finish(newest, 4000)
    changed = [i for i, shape in enumerate(units._shapes) if shape != before[i]]
    assert changed == [len(before) - 2, len(before) - 1]
    model.on_finish(uses[0], 4000)  # forgotten: nothing to reshape
    assert list(units._shapes)[: len(before) - 2] == before[:-2]


def test_a_hint_at_the_end_counts_like_one_at_the_start() -> None:
    """Units and rows are the same whether a request was hinted when it came or when it ended."""
    early, late = ReuseModel(), ReuseModel()
    for n in range(60):
        hint = {"expect_reuse": "likely", "priority": 1} if n % 2 else {}
        a = told(early, n, float(n), [n, n + 1000], **hint)
        b = told(late, n, float(n), [n, n + 1000], output_tokens=UNKNOWN_TOKENS)
        late.on_finish(b, 100, Hint("likely", 0.0, 1) if hint else Hint())
        assert a.rows == b.rows
        assert (a.weight > 1) == (b.weight > 1) == bool(hint)
    assert list(early.units._shapes) == list(late.units._shapes)
    assert list(early.units._thetas) == pytest.approx(list(late.units._thetas), rel=0.01)


def test_blocks_that_are_added_are_known_afterwards() -> None:
    """Output that a request stores is part of it when the next one asks for it."""
    model = ReuseModel()
    use = told(model, 0, 0.0, [1, 2])
    model.on_extend(use, array("Q", [3, 4, 2]).tobytes())
    assert use.known == 0
    after = told(model, 1, 1.0, [1, 2, 3, 4, 5])
    assert after.known == 4
    again = told(model, 2, 2.0, [1, 2, 3, 4, 5])
    assert again.known > 5
    model.on_extend(again, array("Q", [6]).tobytes())
    assert again.known == 5, "only what was there before is known"
