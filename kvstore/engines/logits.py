"""How far logits are from exact ones, and what that costs in predicting a text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one thread: sums come out the same on machines with more or fewer cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class LogitErrors:
    """Sums over positions of a text, each with a vocabulary of logits.

    Divergence is Kullback and Leibler's, of the exact distribution from the other, in nats.
    """

    positions: int = 0
    errors: int = 0
    error_sum: float = 0.0
    error_max: float = 0.0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    loss_sum: float = 0.0
    more_loss_sum: float = 0.0
    more_loss_squares: float = 0.0
    same: int = 0

    def add(self, found: Any, exact: Any, following: Any) -> None:
        """Logits [n, vocabulary] of both, and the tokens [n] that follow in the text."""
        import torch

        found, exact = found.double(), exact.double()
        error = (found - exact).abs()
        ours, theirs = torch.log_softmax(found, 1), torch.log_softmax(exact, 1)
        kl = (theirs.exp() * (theirs - ours)).sum(1)
        self.positions += len(found)
        self.errors += error.numel()
        self.error_sum += float(error.sum())
        self.error_max = max(self.error_max, float(error.max()))
        self.kl_sum += float(kl.sum())
        self.kl_max = max(self.kl_max, float(kl.max()))
        chosen = torch.as_tensor(following, device=ours.device)[:, None]
        self.loss_sum -= float(ours.gather(1, chosen).sum())
        more_loss = (theirs - ours).gather(1, chosen)
        self.more_loss_sum += float(more_loss.sum())
        self.more_loss_squares += float((more_loss**2).sum())
        self.same += int((found.argmax(1) == exact.argmax(1)).sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of the tokens that followed."""
        return math.exp(self.loss_sum / self.positions)

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity over that of the exact logits."""
        return math.exp(self.more_loss_sum / self.positions)

    @property
    def perplexity_ratio_error(self) -> float:
        """The ratio's standard error, with each token's loss taken as independent of the others."""
        mean = self.more_loss_sum / self.positions
        variance = max(0.0, self.more_loss_squares / self.positions - mean**2)
        return self.perplexity_ratio * math.sqrt(variance / self.positions)

    def figures(self) -> dict[str, float]:
        """Means and largest values; raises ZeroDivisionError if nothing was added."""
        return {
            "logit_error_max": self.error_max,
            "logit_error_mean": self.error_sum / self.errors,
            "kl_mean": max(0.0, self.kl_sum / self.positions),
            "kl_max": self.kl_max,
            "same_top_token_share": self.same / self.positions,
            "perplexity": self.perplexity,
            "perplexity_ratio": self.perplexity_ratio,
            "perplexity_ratio_error": self.perplexity_ratio_error,
        }
