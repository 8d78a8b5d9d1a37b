"""Judges a swarm by what its nodes truly serve at every moment, whatever anybody believes."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.span import Span

WARM_UP_S = 60.0


@dataclass(frozen=True)
class Verdict:
    """How a swarm did after the first minute."""

    coverage: float  # the share of time in which every block was served
    weakest_share: float  # the weakest block's throughput over the fractional bound, both averaged over time
    moves_per_node_hour: float
    thin_share: float  # the share of time in which some block had one holder only
    holes_s: tuple[float, ...]  # how long each hole lasted
    mean_holders: float

    def __str__(self) -> str:
        holes = ", ".join(f"{hole:.1f}" for hole in sorted(self.holes_s, reverse=True)[:5]) or "none"
        return (
            f"coverage {self.coverage:.3%}, weakest/bound {self.weakest_share:.3f}, "
            f"moves/node-hour {self.moves_per_node_hour:.3f}, thin {self.thin_share:.2%}, "
            f"holders {self.mean_holders:.1f}, holes [s] {holes}"
        )


class Judge:
    """Told of every change as it happens; adds up the time between."""

    def __init__(self, n_blocks: int) -> None:
        self._n_blocks = n_blocks
        self.speeds, self._holders = [0.0] * n_blocks, [0] * n_blocks
        self._work = 0.0  # blocks x tokens/s of everybody present
        self._nodes = self._moves = 0
        self._now = 0.0
        self._judged_s = self._covered_s = self._thin_s = self._node_s = 0.0
        self._weakest = self._bound = self._held = 0.0
        self._hole_since: float | None = None
        self._holes_s: list[float] = []

    def came(self, now: float, blocks: int, tokens_per_s: float) -> None:
        """A node is there, and could hold so many blocks."""
        self.passed(now)
        self._nodes += 1
        self._work += min(blocks, self._n_blocks) * tokens_per_s

    def went(self, now: float, blocks: int, tokens_per_s: float) -> None:
        """It is not any more."""
        self.passed(now)
        self._nodes -= 1
        self._work -= min(blocks, self._n_blocks) * tokens_per_s

    def serves(self, now: float, span: Span, tokens_per_s: float, sign: int = 1) -> None:
        """A node begins (or with -1, ceases) to serve a span."""
        self.passed(now)
        for block in span.blocks():
            self._holders[block] += sign
            self.speeds[block] = self.speeds[block] + sign * tokens_per_s if self._holders[block] else 0.0
        if min(self._holders) > 0 and self._hole_since is not None:
            if now > WARM_UP_S:
                self._holes_s.append(now - max(self._hole_since, WARM_UP_S))
            self._hole_since = None
        elif min(self._holders) == 0 and self._hole_since is None:
            self._hole_since = now

    def moved(self, now: float) -> None:
        """A node leaves its place for another."""
        self._moves += now > WARM_UP_S

    def passed(self, now: float) -> None:
        """Time went by."""
        elapsed_s, self._now = now - max(self._now, WARM_UP_S), now
        if elapsed_s <= 0:
            return
        self._judged_s += elapsed_s
        self._node_s += elapsed_s * self._nodes
        self._bound += elapsed_s * self._work / self._n_blocks
        self._weakest += elapsed_s * min(self.speeds)
        self._held += elapsed_s * sum(self._holders) / self._n_blocks
        self._covered_s += elapsed_s * (min(self._holders) > 0)
        self._thin_s += elapsed_s * (min(self._holders) < 2)

    def verdict(self, now: float) -> Verdict:
        """The sum of it."""
        self.passed(now)
        if self._hole_since is not None:
            self._holes_s.append(now - max(self._hole_since, WARM_UP_S))
            self._hole_since = now
        judged_s = max(self._judged_s, 1e-9)
        return Verdict(
            self._covered_s / judged_s,
            self._weakest / max(self._bound, 1e-9),
            self._moves / max(self._node_s / 3600, 1e-9),
            self._thin_s / judged_s,
            tuple(self._holes_s),
            self._held / judged_s,
        )
