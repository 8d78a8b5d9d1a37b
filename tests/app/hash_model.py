"""A model made of hashes: its hidden state is a digest of all that it should depend on, so a wrong cache shows at once.

Block b's output at position p is a hash of b, p and every input of the block up to p. `greedy` is the yardstick.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import trio

from app.core.compute import StepWork, TokenChoice
from app.core.errors import AppError
from app.core.pieces import at_once
from app.core.span import Span
from app.session.adapter_index import AdapterIndex, AdapterRef
from engine.errors import CacheFull, SessionError

WIDTH = 4  # numbers of four bytes: a digest of 16
ROW_BYTES = 4 * WIDTH
ADAPTER_BYTES = 64  # of one block, times the rank
INT8_BYTES = 8  # of a row in int8: a scale, and four numbers
T = TypeVar("T")


class Output(NamedTuple):
    """What a step made of one session's rows."""

    data: bytes
    dtype: str


class Launched(NamedTuple):
    """A step under way."""

    is_done: Callable[[], bool]
    result: Callable[[], list[Output]]


class LaunchedStep(NamedTuple):
    """A step under way that others may follow."""

    is_done: Callable[[], bool]
    result: Callable[[], list[Output]]
    rows: Any


class Token(NamedTuple):
    """One more token."""

    token_id: int
    text: str
    finish_reason: str | None
    embedding: bytes
    logprob: None = None


class LaunchedChoice(NamedTuple):
    """A choice under way."""

    is_done: Callable[[], bool]
    take: Callable[[Sequence[int]], list[list[Token]]]
    next_rows: list[bytes]


FINITE = bytes(byte & 0xBF for byte in range(256))  # without the bit that all numbers that are NaN or infinite have


def digest(*parts: bytes | int) -> bytes:
    """16 bytes that depend on all parts: four numbers, of which none is NaN or infinity."""
    made = hashlib.blake2b(b"|".join(p if isinstance(p, bytes) else b"%d" % p for p in parts), digest_size=ROW_BYTES)
    return made.digest().translate(FINITE)


@functools.cache
def _embedding(token: int) -> bytes:
    return digest(b"embed", token)


class HashRunner:
    """Blocks [start, stop) of a model of hashes, with a cache of `kv_tokens`, leased in pages of `page_tokens`."""

    def __init__(
        self, start: int, stop: int, kv_tokens: int = 1 << 20, context_length: int = 4096, page_tokens: int = 1
    ) -> None:
        self.start, self.stop, self.hidden_size = start, stop, WIDTH
        self.context_length, self.kv_total_tokens, self.kv_free_tokens = context_length, kv_tokens, kv_tokens
        self.kv_page_tokens = page_tokens
        self.leases: dict[bytes, int] = {}
        self.caches: dict[tuple[bytes, int], list[bytes]] = {}  # (session, block) -> a running hash for each position
        self.batches: list[list[tuple[bytes, int, int]]] = []
        self.lies = False
        self.launches = 0  # looks until a launched step is done; 0: steps cannot be launched
        self.adapters: dict[bytes, dict[int, bytes]] = {}  # session -> what its adapter adds to each block
        self.exported = self.imported = 0  # tokens whose cache went to other runners, or came from them
        self.aheads: list[list[tuple[bytes, int]]] = []  # the steps that began ahead: sessions and positions
        self.accepted = 0  # tokens of theirs that were asked for
        self._written: dict[bytes, list[tuple[int, dict[int, bytes]]]] = {}  # by them: position, hash by block

    def adapter_bytes(self, rank: int, targets: tuple[str, ...]) -> int:
        return ADAPTER_BYTES * rank

    def load_adapter(
        self, rank: int, alpha: float, targets: tuple[str, ...], vectors: Mapping[int, bytes]
    ) -> dict[int, bytes]:
        return {block: digest(rank, f"{alpha} {targets}".encode(), vector) for block, vector in vectors.items()}

    def open(self, session: bytes, tokens: int, adapter: Any = None) -> None:
        leased = self._in_pages(tokens)
        if leased > self.kv_free_tokens:
            raise CacheFull(f"no room for {tokens} tokens")
        assert session not in self.leases
        self.leases[session] = leased
        self.kv_free_tokens -= leased
        if adapter is not None:
            self.adapters[session] = adapter

    def fork(self, session: bytes, tokens: int, source: bytes, length: int) -> None:
        self.open(session, tokens, self.adapters.get(source))
        for block in range(self.start, self.stop):
            if (source, block) in self.caches:
                assert length <= len(self.caches[source, block])
                self.caches[session, block] = self.caches[source, block][:length]

    def take_over(self, session: bytes, tokens: int, source: bytes, length: int) -> None:
        self.truncate(source, length)
        self.resize(source, tokens)
        self.leases[session] = self.leases.pop(source)
        if source in self.adapters:
            self.adapters[session] = self.adapters.pop(source)
        for block in range(self.start, self.stop):
            if (source, block) in self.caches:
                self.caches[session, block] = self.caches.pop((source, block))

    def resize(self, session: bytes, tokens: int) -> None:
        held = max((len(cache) for (owner, _), cache in self.caches.items() if owner == session), default=0)
        more = self._in_pages(max(tokens, held)) - self.leases[session]
        if more > self.kv_free_tokens:
            raise CacheFull(f"no room for {tokens} tokens")
        self.leases[session] += more
        self.kv_free_tokens -= more

    def _in_pages(self, tokens: int) -> int:
        return -(-tokens // self.kv_page_tokens) * self.kv_page_tokens

    def tokens_freed_by(self, sessions: Iterable[bytes]) -> int:
        return sum(self.leases[session] for session in sessions)

    def close(self, session: bytes) -> None:
        self.adapters.pop(session, None)
        self.kv_free_tokens += self.leases.pop(session, 0)
        for key in [key for key in self.caches if key[0] == session]:
            del self.caches[key]

    def truncate(self, session: bytes, length: int) -> None:
        for (owner, _), cache in self.caches.items():
            if owner == session:
                assert length <= len(cache)
                del cache[length:]

    @property
    def cache_format(self) -> str:
        return "hashes"

    @property
    def cache_row_bytes(self) -> int:
        return ROW_BYTES

    def export_cache(self, session: bytes, blocks: tuple[int, int], start: int, stop: int) -> bytes:
        if session not in self.leases:
            raise SessionError("no such session")
        caches = [self.caches[session, block] for block in range(*blocks)]
        assert all(stop <= len(cache) for cache in caches)
        self.exported += stop - start
        return b"".join(b"".join(cache[start:stop]) for cache in caches)

    def import_cache(self, session: bytes, blocks: tuple[int, int], position: int, data: memoryview) -> None:
        rows = len(data) // (ROW_BYTES * (blocks[1] - blocks[0]))
        made = bytes(data)
        for index, block in enumerate(range(*blocks)):
            cache = self.caches.setdefault((session, block), [])
            if session not in self.leases or len(cache) != position:
                raise SessionError(f"position {position} does not continue {len(cache)} tokens")
            first = index * rows * ROW_BYTES
            cache += [made[at : at + ROW_BYTES] for at in range(first, first + rows * ROW_BYTES, ROW_BYTES)]
        self.imported += rows

    def prepare(self) -> bool:
        return False

    def launch(self, work: Sequence[StepWork]) -> Launched | None:
        if not self.launches:
            return None
        looks = iter([False] * self.launches)
        return Launched(lambda: next(looks, True), lambda: self.step(work))

    def launch_ahead(self, work: Sequence[StepWork], rows: Any) -> LaunchedStep | None:
        if not self.launches:
            return None
        self.aheads.append([(item.session, item.position) for item in work])
        outputs: list[Output] = []
        for item, row in zip(work, rows, strict=True):
            assert not item.data, "what the device is about to know is not sent"
            real = {block: self.caches.get((item.session, block), []) for block in range(item.start, item.stop)}
            before = self._written.setdefault(item.session, [])
            for block, cache in real.items():  # behind those that other steps ahead wrote
                known = [made[block] for position, made in before if len(cache) <= position < item.position]
                self.caches[item.session, block] = [*cache, *known]
            outputs.append(self._advance(item._replace(data=memoryview(row), dtype="f32")))
            made = {block: self.caches[item.session, block][-1] for block in real}
            before[:] = [*(one for one in before if one[0] < item.position), (item.position, made)]
            self.caches.update({(item.session, block): cache for block, cache in real.items()})
        looks = iter([False] * self.launches)
        return LaunchedStep(lambda: next(looks, True), lambda: outputs, [output.data for output in outputs])

    def accept(self, session: bytes, length: int) -> None:
        made = next(made for position, made in self._written[session] if position == length - 1)
        for block, hash_ in made.items():
            assert len(self.caches[session, block]) == length - 1
            self.caches[session, block].append(hash_)
        self.accepted += 1

    def step(self, work: Sequence[StepWork]) -> list[Output]:
        self.batches.append([(item.session, item.position, item.rows) for item in work])
        return [self._advance(item) for item in work]

    def _advance(self, item: StepWork) -> Output:
        if item.session not in self.leases:
            raise SessionError("no such session")
        assert self.start <= item.start < item.stop <= self.stop
        data = bytes(item.data)
        size = _row_bytes(item.dtype)
        rows = [data[at : at + size] for at in range(0, len(data), size)]
        assert len(rows) == item.rows
        for block in range(item.start, item.stop):
            cache = self.caches.setdefault((item.session, block), [])
            if len(cache) != item.position:
                raise SessionError(f"position {item.position} does not continue {len(cache)} tokens")
            rows = through(block, cache, rows, self.adapters.get(item.session, {}).get(block, b""))
        return Output(b"".join(_on_wire(row, item.wire) for row in rows), item.wire or "f32")


def _row_bytes(dtype: str) -> int:
    return INT8_BYTES if dtype == "int8" else ROW_BYTES


def _on_wire(row: bytes, wire: str) -> bytes:
    """A row as it is sent; int8 keeps a quarter of it."""
    return struct.pack("<f", 1.0) + row[:WIDTH] if wire == "int8" else row


def through(block: int, cache: list[bytes], rows: Sequence[bytes], adapter: bytes = b"") -> list[bytes]:
    """Run rows through one block, growing its cache."""
    outputs = []
    last, name = cache[-1] if cache else b"", b"%d|%b" % (block, adapter)
    for position, row in enumerate(rows, len(cache)):
        # One hash for both, with nothing else: whole prompts of many streams come through here.
        made = hashlib.blake2s(b"%b|%b|%d|%b" % (last, row, position, name)).digest().translate(FINITE)
        last = made[:ROW_BYTES]
        cache.append(last)
        outputs.append(made[ROW_BYTES:])
    return outputs


@dataclass(frozen=True)
class HashEnds:
    """The ends of a model of hashes."""

    n_blocks: int = 8
    context_length: int = 4096
    hidden_size: int = WIDTH
    dtype: str = "f32"
    launches: int = 0  # looks until a launched choice is done; 0: choices cannot be launched

    def embed(self, token_ids: Sequence[int], wire: str = "") -> bytes:
        return b"".join(_on_wire(_embedding(token), wire) for token in token_ids)

    def begin(self, prompt_ids: Sequence[int], settings: Any) -> HashReply:
        return HashReply(int(settings))

    def choose(self, choices: Sequence[TokenChoice]) -> list[list[Token]]:
        return [self._choose(choice) for choice in choices]

    def _choose(self, choice: TokenChoice) -> list[Token]:
        tokens: list[Token] = []
        for place in range(len(choice.guesses) + 1):
            size = _row_bytes(choice.dtype)
            first = len(choice.hidden) - (len(choice.guesses) + 1 - place) * size
            token = token_of(bytes(choice.hidden[first : first + size])[-WIDTH if size == INT8_BYTES else 0 :])
            choice.reply.left -= 1
            tokens.append(Token(token, f"{token} ", None if choice.reply.left else "length", self.embed([token])))
            if not choice.reply.left or place == len(choice.guesses) or choice.guesses[place] != token:
                break
        return tokens

    def launch(self, choices: Sequence[TokenChoice]) -> LaunchedChoice | None:
        if not self.launches:
            return None
        rows = [bytes(choice.hidden)[-ROW_BYTES:] for choice in choices]
        return self._under_way(rows, lambda index: self._choose(choices[index]))

    def launch_ahead(self, choices: Sequence[TokenChoice], rows: Any) -> LaunchedChoice | None:
        if not self.launches or rows is None or any(choice.reply.left < 2 for choice in choices):
            return None
        after = [TokenChoice(one.reply, memoryview(row), "f32") for one, row in zip(choices, rows, strict=True)]
        return self._under_way(rows, lambda index: self._choose(after[index]))

    def _under_way(self, rows: Sequence[bytes], choose: Callable[[int], list[Token]]) -> LaunchedChoice:
        looks = iter([False] * self.launches)
        embedded = [self.embed([token_of(row)]) for row in rows]
        return LaunchedChoice(lambda: next(looks, True), lambda indices: list(map(choose, indices)), embedded)

    def deviation(self, one: Sequence[Any], other: Sequence[Any]) -> tuple[float, float]:
        return (0.0, 0.0) if [state.data for state in one] == [state.data for state in other] else (1.0, 1.0)


class HashReply:
    """Counts the tokens that may still come."""

    def __init__(self, max_tokens: int) -> None:
        self.left = max_tokens


class HashAdapter:
    """An adapter for a model of hashes."""

    def __init__(self, seed: int, rank: int = 1, n_blocks: int = 8) -> None:
        self.vectors = [digest(seed, block) * (ADAPTER_BYTES * rank // ROW_BYTES) for block in range(n_blocks)]
        roots = tuple(hashlib.sha256(vector).digest() for vector in self.vectors)
        self.index = AdapterIndex(rank, 2.0, ("q", "v"), len(self.vectors[0]), roots)
        raw = self.index.encoded()
        self.ref = AdapterRef(hashlib.sha256(raw).digest(), len(raw))

    def added(self) -> dict[int, bytes]:
        """What it adds to each block."""
        index = self.index
        return HashRunner(0, 0).load_adapter(index.rank, index.alpha, index.targets, dict(enumerate(self.vectors)))


class AdapterShelf:
    """Adapters that hops can have of every asker at once, or `seconds` later; counts how often each was asked for."""

    def __init__(self, *adapters: HashAdapter, seconds: float = 0.0) -> None:
        self.adapters, self.seconds = {one.ref: one for one in adapters}, seconds
        self.asked: list[tuple[str, AdapterRef]] = []

    async def index(self, asker: str, adapter: AdapterRef) -> AdapterIndex:
        self.asked.append((asker, adapter))
        await trio.lowlevel.checkpoint()
        if adapter not in self.adapters:
            raise AppError("the asker has no such adapter")
        return self.adapters[adapter].index

    async def vectors(self, asker: str, index: AdapterIndex, span: Span, arrived: Callable[[int], None]) -> list[bytes]:
        await trio.sleep(self.seconds)
        found = next(one for one in self.adapters.values() if one.index is index)
        return found.vectors[span.start : span.stop]


def token_of(hidden: bytes) -> int:
    """The token that a hidden state stands for."""
    return int.from_bytes(hidden[:4], "little")


def greedy(prompt: Sequence[int], count: int, n_blocks: int = 8, adapter: HashAdapter | None = None) -> list[int]:
    """What the undisturbed model replies."""
    added = {} if adapter is None else adapter.added()
    ends = HashEnds(n_blocks)
    caches: list[list[bytes]] = [[] for _ in range(n_blocks)]
    tokens: list[int] = []
    new = list(prompt)
    for _ in range(count):
        data = ends.embed(new)
        rows = [data[at : at + ROW_BYTES] for at in range(0, len(data), ROW_BYTES)]
        for block, cache in enumerate(caches):
            rows = through(block, cache, rows, added.get(block, b""))
        tokens.append(token_of(rows[-1]))
        new = [tokens[-1]]
    return tokens


def last_hidden(history: Sequence[int], n_blocks: int = 8) -> bytes:
    """The undisturbed model's output behind the last of these tokens."""
    rows = [HashEnds(n_blocks).embed([token]) for token in history]
    for block in range(n_blocks):
        rows = through(block, [], rows)
    return rows[-1]


def whole_result(made: Any) -> Any:
    """Return the result of all pieces of a generator, and anything else as it is."""
    return at_once(made) if isinstance(made, Generator) else made


class InlineDevice:
    """Runs work on the loop after a while of simulated time: threads and an autojumping clock do not mix."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        if self.seconds:
            await trio.sleep(self.seconds)
        else:
            await trio.lowlevel.checkpoint()
        result: T = whole_result(function(*args))
        return result

    async def run_later(self, function: Callable[..., Any], *args: Any) -> Any:
        return await self.run(function, *args)

    async def run_beside(self, function: Callable[..., T], *args: Any) -> T:
        return await self.run(function, *args)
