"""Least squares for a handful of unknowns, in plain floats: at this size faster than numpy."""

from __future__ import annotations

from collections.abc import Sequence

Vector = list[float]
Matrix = list[Vector]


def solve(gram: Sequence[Sequence[float]], vector: Sequence[float]) -> Vector:
    """x with gram x = vector, gram symmetric and positive definite, by elimination."""
    size = len(vector)
    rows = [[*gram[i], vector[i]] for i in range(size)]
    for i in range(size):
        pivot = rows[i]
        for j in range(i + 1, size):
            row = rows[j]
            factor = row[i] / pivot[i]
            if factor:
                for k in range(i + 1, size + 1):
                    row[k] -= factor * pivot[k]
    x = [0.0] * size
    for i in range(size - 1, -1, -1):
        row = rows[i]
        rest = sum(row[j] * x[j] for j in range(i + 1, size))
        x[i] = (row[size] - rest) / row[i]
    return x


def solve_non_negative(gram: Matrix, vector: Vector) -> Vector:
    """The x >= 0 that minimises x'Gx/2 - v'x, G positive definite.

    Active set as in Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23, but
    started from the unconstrained solution, which is the answer nearly always.
    """
    size = len(vector)
    free = list(range(size))
    x = solve(gram, vector)
    for _ in range(4 * size):
        lowest = min(free, key=x.__getitem__, default=None)
        if lowest is not None and x[lowest] < 0:
            free.remove(lowest)
        else:
            fixed = [i for i in range(size) if i not in free]
            uphill = {i: vector[i] - sum(map(float.__mul__, gram[i], x)) for i in fixed}
            best = max(uphill, key=uphill.__getitem__, default=None)
            if best is None or uphill[best] <= 1e-12 * max(map(abs, vector)):
                break
            free.append(best)
        part = solve([[gram[i][j] for j in free] for i in free], [vector[i] for i in free])
        x = [0.0] * size
        for i, value in zip(free, part, strict=True):
            x[i] = value
    return [max(0.0, value) for value in x]


def with_ridge(gram: Matrix, vector: Vector, target: Vector, ridge: float) -> tuple[Matrix, Vector]:
    """The equations with (ridge / 2) |x - target|^2 added to what is minimised."""
    size = len(vector)
    full = [[gram[i][j] + (ridge if i == j else 0.0) for j in range(size)] for i in range(size)]
    return full, [v + ridge * t for v, t in zip(vector, target, strict=True)]


def trace(gram: Matrix) -> float:
    return sum(gram[i][i] for i in range(len(gram)))
