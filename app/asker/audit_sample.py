"""What is kept of a reply in case it is audited: a stretch of its answers, and who took part. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.routing.route import Privacy, Route
from app.session.wire import DTYPE_NAMES, Frame

WINDOW = 8  # answers of a reply that are kept and compared


class HiddenStates(NamedTuple):
    """One hidden state as it came from the wire."""

    data: bytes
    dtype: str


@dataclass(frozen=True)
class AuditSample:
    """What is kept of a reply: its tokens, who took part, and the answers behind some of them."""

    tokens: tuple[int, ...]
    first: int  # so many tokens lie before the first answer that is kept
    answers: tuple[HiddenStates, ...]  # one token further each
    peers: frozenset[str]
    precisions: tuple[str, ...]  # of the blocks
    room: int  # tokens that the session had room for
    privacy: Privacy
    settings: Any  # of the reply, for its ends

    @property
    def cost(self) -> int:
        """Tokens that go through the swarm when it is computed again."""
        return self.first + len(self.answers) - 1


class AuditSampler:
    """Keeps the answers of one stretch of a reply, each stretch being as likely to be the one."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._count = 0
        self.first = 0  # the number of the first answer that is kept
        self.answers: list[HiddenStates] = []
        self.peers: set[str] = set()

    def note(self, answer: HiddenStates, route: Route) -> None:
        """The reply's next answer came over this route."""
        self.peers.update(hop.peer for hop in route)
        stretch, at = divmod(self._count, WINDOW)
        if at == 0 and self._rng.random() < 1 / (stretch + 1):
            self.first, self.answers = self._count, []
        if self._count < self.first + WINDOW:
            self.answers.append(answer)
        self._count += 1


def last_state(frame: Frame) -> HiddenStates:
    """The hidden state behind the last token of a frame."""
    size = len(frame.body) // frame.rows
    return HiddenStates(bytes(frame.body[-size:]), DTYPE_NAMES[frame.dtype])
