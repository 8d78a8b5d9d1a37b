"""The values of routing: routes and hops, the request of a session, and the error if no route exists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from app.core.errors import AppError
from app.core.span import Span

MAX_PRIVATE_BLOCKS = 4096  # largest number that can be asked for at either end
LinkSeconds = Callable[[str, str], float]  # one-way seconds between two peers; "" is the asker


class Hop(NamedTuple):
    """One peer's part of a route."""

    peer: str
    span: Span


Route = tuple[Hop, ...]


class NoRoute(AppError):
    """Some block has no usable peer that serves it; `who` and `why` say which peers were considered."""

    code = "no_route"

    def __init__(
        self,
        block: int,
        why: str = "",
        *,
        who: str = "nobody",
        busy: bool = False,
        code: str | None = None,
        peers: Iterable[str] = (),
    ) -> None:
        text = f"no route: {who} serves block {block}{why or ' now; wait until a member hosts it'}"
        super().__init__(text, code="busy" if busy else code, peers=tuple(peers))
        self.block = block
        self.busy = busy  # the peers that serve it work, but have no room


@dataclass(frozen=True)
class Privacy:
    """Blocks that may run only on trusted peers: the first and the last, whose hidden states reveal the text."""

    edge: int = 0  # number of private blocks at either end
    blocks: int = 0  # of the model
    trusted: frozenset[str] = frozenset()

    def allows(self, peer: str, block: int) -> bool:
        """True if this peer may run this block."""
        return self.edge <= block < self.blocks - self.edge or not self.edge or peer in self.trusted


@dataclass(frozen=True)
class RouteRequest:
    """Requirements of a session on its route."""

    wanted: Span
    tokens: int  # KV cache needed at each hop
    prompt_tokens: int = 0
    origin: str = ""  # peer that sends to the first hop; "" is the asker
    target: str = ""  # peer that the last hop sends to; "" is the asker
    privacy: Privacy = Privacy()


@dataclass(frozen=True)
class KnownCosts:
    """Costs that the asker knows itself; they override members' claims."""

    block_s: Mapping[str, float] = field(default_factory=dict)  # measured seconds per token and block
    penalty_s: Mapping[str, float] = field(default_factory=dict)  # extra seconds per token because of low trust
