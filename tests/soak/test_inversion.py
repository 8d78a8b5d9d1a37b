"""What a hop can read: the share of tokens that come back out of the starter model's hidden states, by depth.

Three ways: the nearest embedding; a small trained inverter (ridge regression from hidden states to embeddings, then the
nearest); and the model's own head, which finds the token that comes next. With `private_blocks` K a stranger's hop sees
the states after K blocks up to those before the last K; it takes the best depth of these. The table in `SECURITY.md`
holds the figures, and this test measures them again.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from app.config.home import cache_folder
from engine.errors import SourceError
from engine.local_model import LocalModel, load_local, local_options
from engine.model.kv_cache import Segment
from engine.sources.opening import open_source
from engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.soak

ROOT = Path(__file__).resolve().parents[2]
TRAINED_ON, TESTED_ON = 24, 2  # sequences
LENGTH = 512  # tokens of a sequence
RIDGE = 1e-2  # of the mean square of the inputs
PRIVATE = (0, 1, 2, 4)
DEPTHS = (0, 1, 2, 4, 8, 15, 22, 26, 28, 29, 30)  # blocks before the states that are looked at
TOLERANCE = 5  # points
ROW = re.compile(r"^\| (\d+) \| (\d+) % \| (\d+) % \| (\d+) % \|$", re.MULTILINE)


class Recovered(NamedTuple):
    """Shares of tokens, 0 to 1."""

    nearest: float
    inverter: float
    following: float

    def best(self, other: Recovered) -> Recovered:
        """The better of each."""
        return Recovered(*map(max, self, other))


@pytest.fixture(scope="module")
def model() -> LocalModel:
    try:
        source = open_source("starter", cache_folder())
    except SourceError as error:
        pytest.skip(f"the starter model cannot be had: {error}")
    return load_local(source, local_options(source, torch.device("cpu"), torch.float32, 1 << 34))


def sequences(tokenizer: Tokenizer, text: str, count: int) -> list[list[int]]:
    """The first tokens of a text, in sequences of `LENGTH`."""
    ids = tokenizer.encode(text)
    assert len(ids) >= count * LENGTH, "the text is too short"
    return [ids[at : at + LENGTH] for at in range(0, count * LENGTH, LENGTH)]


def states(model: LocalModel, ids: list[int]) -> list[Tensor]:
    """Hidden states (LENGTH, hidden) at each of `DEPTHS`."""
    found = [model.ends.embed(ids)]
    for start, stop in pairwise(DEPTHS):
        lease = model.span.open(len(ids))
        found.append(model.span.step(found[-1], [Segment(lease, 0, len(ids))], (start, stop)).clone())
        lease.close()
    return found


def nearest(rows: Tensor, embeddings: Tensor) -> Tensor:
    """The token whose embedding points most nearly the same way as each row."""
    return (torch.nn.functional.normalize(rows, dim=1) @ embeddings.T).argmax(1)


def inverter(inputs: Tensor, wanted: Tensor) -> Tensor:
    """The matrix that turns hidden states (N, hidden) into embeddings (N, hidden), by ridge regression."""
    squares = inputs.T @ inputs
    damped = squares + RIDGE * squares.diagonal().mean() * torch.eye(len(squares))
    solved: Tensor = torch.linalg.solve(damped, inputs.T @ wanted)
    return solved


def by_depth(model: LocalModel, trained: list[list[int]], tested: list[list[int]]) -> list[Recovered]:
    """What is recovered of the tested tokens at each depth."""
    table = model.ends.embed(range(model.config.vocab_size))
    directions = torch.nn.functional.normalize(table, dim=1)
    known = [torch.cat(layer) for layer in zip(*(states(model, ids) for ids in trained), strict=True)]
    seen = [torch.cat(layer) for layer in zip(*(states(model, ids) for ids in tested), strict=True)]
    truth = torch.tensor([token for ids in tested for token in ids])
    wanted = directions[torch.tensor([token for ids in trained for token in ids])]
    following = model.ends.logits(seen[-1]).argmax(1)  # the model's own choice
    found = []
    for inputs, rows in zip(known, seen, strict=True):
        inverted = rows @ inverter(inputs, wanted)
        found.append(
            Recovered(
                float((nearest(rows, directions) == truth).float().mean()),
                float((nearest(inverted, directions) == truth).float().mean()),
                float((model.ends.logits(rows).argmax(1) == following).float().mean()),
            )
        )
    return found


@pytest.mark.timeout(3600)
def test_the_table_of_what_a_hop_can_read_is_true(model: LocalModel) -> None:
    tokenizer = model._text.tokenizer
    prose = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    documents = "\n".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    with torch.inference_mode():
        depths = by_depth(model, sequences(tokenizer, prose, TRAINED_ON), sequences(tokenizer, documents, TESTED_ON))
    assert DEPTHS[-1] == model.config.n_blocks
    for depth, one in zip(DEPTHS, depths, strict=True):
        print(f"after {depth} blocks: nearest {one.nearest:.0%}, inverter {one.inverter:.0%}, next {one.following:.0%}")
    measured = {}
    for private in PRIVATE:
        seen = range(private, DEPTHS[-1] - private + 1)
        best = Recovered(0, 0, 0)
        for depth, one in zip(DEPTHS, depths, strict=True):
            best = best.best(one) if depth in seen else best
        measured[private] = tuple(round(100 * share) for share in best)
        print(f"| {private} | " + " | ".join(f"{share} %" for share in measured[private]) + " |")
    said = {int(row[0]): tuple(map(int, row[1:])) for row in ROW.findall((ROOT / "SECURITY.md").read_text())}
    assert said.keys() == measured.keys()
    for private, shares in measured.items():
        assert all(abs(a - b) <= TOLERANCE for a, b in zip(shares, said[private], strict=True)), (private, shares)
