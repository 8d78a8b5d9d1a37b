"""The memory that a training job is said to take, beside what it takes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from app.rounds.founding import TrainWish
from app.rounds.train_jobs import TrainJobs
from tests.app.rounds.test_own_data import made_up
from tests.app.rounds.test_rejoining import run_alone, some_rounds

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6, "hidden_size": 768, "intermediate_size": 2048,
    "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 264, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
SPARE_BYTES = 100_000_000  # of libraries that are loaded meanwhile


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(folder: Path, number_format: str) -> None:
    """Found a job, make some rounds, and write what was forecast and what it took."""
    (folder / "text.txt").write_text(made_up(1))
    (folder / "shape.json").write_text(json.dumps(SHAPE))
    wish = TrainWish(
        "fish", (str(folder / "text.txt"),), shape=str(folder / "shape.json"), steps=10**6, every=1, batch=32,
        length=16, licence="MIT", wire=number_format,
    )  # fmt: skip

    async def train(jobs: TrainJobs) -> None:
        before = peak_bytes()
        forecast = (await jobs.forecast(wish))["memory_bytes"]
        await jobs.found(wish)
        await some_rounds(jobs, 3)
        sys.stdout.write(json.dumps({"forecast": forecast, "took": peak_bytes() - before}))

    trio.run(run_alone, folder, train)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number_format", ["int8", "f32"])
def test_a_job_takes_no_more_memory_than_was_forecast(tmp_path: Path, number_format: str) -> None:
    """A short form of it, without what is written and sent, is in `tests/engine/test_island.py`."""
    command = [sys.executable, "-m", __name__, str(tmp_path), number_format]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["took"] <= found["forecast"] + SPARE_BYTES, found


if __name__ == "__main__":
    measure(Path(sys.argv[1]), sys.argv[2])
