"""The values of routing: a route and its hops, what is asked of it, and the error where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from app.core.errors import AppError
from app.core.span import Span

MAX_PRIVATE_BLOCKS = 4096  # that anybody may ask for at either end
LinkSeconds = Callable[[str, str], float]  # one way between two peers; "" is the asker


class Hop(NamedTuple):
    """One node's share of a route."""

    peer: str
    span: Span


Route = tuple[Hop, ...]


class NoRoute(AppError):
    """Some block is served by nobody that can be used now."""

    code = "no_route"

    def __init__(
        self, block: int, why: str = "", *, busy: bool = False, code: str | None = None, peers: Iterable[str] = ()
    ) -> None:
        text = f"no route: nobody serves block {block}{why or ' now; wait for a member to take it over'}"
        super().__init__(text, code="busy" if busy else code, peers=tuple(peers))
        self.block = block
        self.busy = busy  # its holders are well, but have no room


@dataclass(frozen=True)
class Privacy:
    """Which blocks may run only on trusted peers: the first and the last, where a text can be told from the states."""

    edge: int = 0  # so many at either end
    blocks: int = 0  # of the whole model
    trusted: frozenset[str] = frozenset()

    def allows(self, peer: str, block: int) -> bool:
        """Whether this peer may run this block."""
        return self.edge <= block < self.blocks - self.edge or not self.edge or peer in self.trusted


@dataclass(frozen=True)
class RouteRequest:
    """What a session asks of its route."""

    wanted: Span
    tokens: int  # cache room at each hop
    prompt_tokens: int = 0
    origin: str = ""  # who sends to the first hop
    target: str = ""  # whom the last hop answers
    privacy: Privacy = Privacy()


@dataclass(frozen=True)
class KnownCosts:
    """What an asker knows by itself, whatever members claim."""

    block_s: Mapping[str, float] = field(default_factory=dict)  # measured: one token through one block of a peer
    penalty_s: Mapping[str, float] = field(default_factory=dict)  # what it would pay to go without a peer
