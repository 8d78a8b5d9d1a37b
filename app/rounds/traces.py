"""Traces of steps: what an island keeps of a round, so that testers can compute one of its steps again. Pure.

A trace is of one step: the weights before it, as the distance from those that all islands had before the round
(bfloat16), and a sketch of the gradient that the island computed there, some numbers that are seeded sums of it. The
island commits to all traces of a round with its change; after the round the lot names one, and testers compute its
gradient from those weights and from the text that was to be read in that step, and compare sketches.

Why in this way: all steps of a round follow from the weights, the text and the optimiser's moments. Moments are the
island's own and twice as large as the weights, and steps that follow each other on another machine drift apart; but the
gradient of one step depends on weights and text alone. To hash all weights in every step of a large model would take
too long, and the first step of each round, of which everybody has the weights, would be no lot. So traces of as many
steps as fit into `TRACE_BYTES` are kept, which is every step for a small model, and the first one, whose weights take
no bytes, for a very large one. Who wants to pass has to compute the gradients of those steps on its text, whatever it
sends as its change; that the change follows from them is not shown.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

from app.core.errors import RecordError
from app.manifest.merkle import HASH_BYTES

TRACE_BYTES = 128 * 2**20  # of all traces of a round
MOST_TRACES = 64  # of a round
MOST_NUMBERS = 64  # of a sketch


class Trace(NamedTuple):
    """What a member commits to for one step: the root over the leaves of its weights, and the gradient's sketch."""

    root: bytes
    sketch: tuple[float, ...]


class StepTraces:
    """The traces of a round under way: of which steps, with which seed, and what was kept of those made so far."""

    def __init__(self, steps: Sequence[int], seed: bytes) -> None:
        self.steps, self.seed = frozenset(steps), seed
        self.weights: list[list[bytes]] = []  # leaves for each traced step, in order
        self.sketches: list[tuple[float, ...]] = []

    def add(self, weights: list[bytes], sketch: tuple[float, ...]) -> None:
        """Keep the trace of the next traced step."""
        self.weights.append(weights)
        self.sketches.append(sketch)


def traced_steps(every: int, trace_bytes: int) -> list[int]:
    """Return the steps of a round, from 0, of which traces are kept: all, or as many as fit, at equal distances."""
    count = max(1, min(every, MOST_TRACES, TRACE_BYTES // trace_bytes))
    return [every * index // count for index in range(count)]


def most_trace_bytes(trace_bytes: int) -> int:
    """Return the most that the traces of a round take in the machine's memory."""
    return min(TRACE_BYTES, MOST_TRACES * trace_bytes)


def trace_seed(job: bytes, prev: bytes, peer: str) -> bytes:
    """Return the seed of a member's sketches in the round after the one with the hash `prev`."""
    return hashlib.sha256(b"shoal trace" + job + prev + peer.encode()).digest()


def pack_trace(trace: Trace) -> bytes:
    """Return a trace as bytes: the root, then the numbers of the sketch as float32, little-endian."""
    return trace.root + struct.pack(f"<{len(trace.sketch)}f", *trace.sketch)


def unpack_trace(raw: bytes) -> Trace:
    """Return the trace in some bytes; raises `RecordError`. Its numbers may be anything that a float can be."""
    count, left = divmod(len(raw) - HASH_BYTES, 4)
    if left or not 0 < count <= MOST_NUMBERS:
        raise RecordError(f"{len(raw)} bytes are not the trace of a step")
    return Trace(raw[:HASH_BYTES], struct.unpack(f"<{count}f", raw[HASH_BYTES:]))
