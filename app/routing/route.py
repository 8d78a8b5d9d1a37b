"""The values of routing: routes and hops, the request of a session, and the error if no route exists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from app.core.errors import AppError
from app.core.span import Span
from app.session.wire import CACHE_EXCEEDED

MAX_PRIVATE_BLOCKS = 4096  # largest number that can be asked for at either end
LinkSeconds = Callable[[str, str], float]  # one-way seconds between two peers; "" is the asker


class Hop(NamedTuple):
    """One peer's part of a route."""

    peer: str
    span: Span


Route = tuple[Hop, ...]
Visit = tuple[str, int]  # a peer and the first block that it runs, before a peer's visits are merged into one hop


class ReadingPace(NamedTuple):
    """How fast a hop reads a prompt, as was believed when it was chosen."""

    step_s: float = 0.0  # seconds for a step of any size, and
    token_s: float = 0.0  # for each token besides, by its own word
    times: float = 1.0  # as long as that, as it was measured
    block_s: float = 0.0  # measured seconds of a single token in one block

    def claimed_s(self, tokens: int) -> float:
        """Seconds for so many tokens, by the hop's own word."""
        return self.step_s + tokens * self.token_s

    def expected_s(self, tokens: int) -> float:
        """Seconds for so many tokens, as it was measured."""
        return self.times * self.claimed_s(tokens)


class RouteTimes(NamedTuple):
    """How long a reply takes over a route, as is believed; without end if a hop has left."""

    first_token_s: float
    token_s: float  # each one after it


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
        loading_here: bool = False,
    ) -> None:
        text = f"no route: {who} serves block {block}{why or ' now; wait until a member hosts it'}"
        super().__init__(text, code="busy" if busy else code, peers=tuple(peers))
        self.block = block
        self.busy = busy  # the peers that serve it work, but have no room
        self.loading_here = loading_here  # this node fetches or loads it now

    @property
    def is_hole(self) -> bool:
        """True if nobody serves the block at all."""
        return not self.busy and self.code == "no_route"

    @property
    def is_too_large(self) -> bool:
        """True if the session is larger than the cache of every peer that serves the block."""
        return self.code == CACHE_EXCEEDED


@dataclass(frozen=True)
class Privacy:
    """Blocks that may run only on trusted peers: the first and the last, whose hidden states reveal the text."""

    edge: int = 0  # number of private blocks at either end
    blocks: int = 0  # of the model
    trusted: frozenset[str] = frozenset()

    def allows(self, peer: str, block: int) -> bool:
        """True if this peer may run this block."""
        return peer in self.trusted or not self.is_private(block)

    def is_private(self, block: int) -> bool:
        """True if only trusted peers may run this block."""
        return self.edge > 0 and not self.edge <= block < self.blocks - self.edge


def no_route(block: int, privacy: Privacy) -> NoRoute:
    """Return the error for a block that no usable member may run."""
    if not privacy.is_private(block):
        return NoRoute(block)
    return NoRoute(
        block,
        f", and the first and last {privacy.edge} blocks may run only on trusted peers: host it here, trust a peer "
        "that serves it with `shoal config set trusted`, or lower private_blocks",
        who="no trusted peer",
        code="private_blocks",
    )


@dataclass(frozen=True)
class RouteRequest:
    """Requirements of a session on its route."""

    wanted: Span
    tokens: int  # KV cache needed at each hop
    prompt_tokens: int = 0
    origin: str = ""  # peer that sends to the first hop; "" is the asker
    target: str = ""  # peer that the last hop sends to; "" is the asker
    privacy: Privacy = Privacy()
    row_bytes: int = 0  # of one token's hidden state on a link
    full: Collection[str] = ()  # peers that refused such a session lately: used only if there is no other
    links: Collection[frozenset[str]] = ()  # between hops, that it may use though they broke lately
    finest_first: bool = True  # members that rounded their weights to 4 bits are a last resort

    @property
    def bytes_per_token(self) -> float:
        """Bytes on each link for one token of the reply, including its share of the prompt."""
        return self.row_bytes * (1 + self.prompt_tokens / max(self.tokens - self.prompt_tokens, 1))


@dataclass(frozen=True)
class KnownCosts:
    """Costs that the asker knows itself; they override members' claims."""

    block_s: Mapping[str, float] = field(default_factory=dict)  # measured seconds per token and block
    penalty_s: Mapping[str, float] = field(default_factory=dict)  # extra seconds per token because of low trust
    byte_s: Mapping[str, float] = field(default_factory=dict)  # seconds to receive a byte and to send it on
    hop_s: Mapping[str, float] = field(default_factory=dict)  # measured overhead of a hop per token, as `HOP_S` is
    homes: Mapping[str, str] = field(default_factory=dict)  # `app.serving.homes`; who has none here has its own
    to_try: Collection[str] = ()  # members whose claims are limited by the fastest that was measured alone
