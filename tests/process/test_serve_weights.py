"""Joining with nothing: machines without the model get manifest, ends and blocks from the one that has them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from app.api.client import client_of
from tests.process.node_process import Place, Serving, is_covered, wait_until

PROMPT = ["Once upon a time", "--temperature", "0", "--max-tokens", "16"]


def test_machines_with_nothing_host_and_ask(tmp_path: Path) -> None:
    seed = Place(tmp_path / "seed", tmp_path / "seed-cache")
    assert seed.shoal("create", "home", "--model", "tiny-random").status == 0
    alone = seed.facts("chat", *PROMPT, "--local", "--model", "tiny-random", "--device", "cpu")
    with ExitStack() as stack:
        first = stack.enter_context(Serving(seed, "--discovery=invite"))  # it has the files, and hosts nothing
        first.ready()
        invite = seed.shoal("invite").out.strip()
        joined = []
        for name, blocks in (("left", "--blocks=0:4"), ("right", "--blocks=4:8"), ("asker", "")):
            place = Place(tmp_path / name, tmp_path / f"{name}-cache")
            flags = ["--discovery=invite", "--device=cpu", *([blocks] if blocks else [])]
            node = Serving(place, *flags, max_vram="1GB" if blocks else "0", SHOAL_INVITE=invite)
            joined.append(stack.enter_context(node))
        for node in joined:
            node.ready()
        left, right, asker = (node.place for node in joined)
        wait_until(lambda: is_covered(asker), "all blocks are held")
        reply = asker.facts("chat", *PROMPT)
        assert reply["token_ids"] == alone["token_ids"]
        assert [hop["peer"] for hop in reply["route"]] == [place.node_file()["peer_id"] for place in (left, right)]
        came = [step.state for step in client_of(asker.home).snapshot().steps if step.key == "ends"]
        assert came == ["done"]  # a client shows how far what it needs is, too
        parts = {path.name for path in (tmp_path / "left-cache" / "parts").iterdir() if "." not in path.name}
        assert len(parts) == 4 + 3  # its span and the ends, no more
        assert not (tmp_path / "left-cache" / "models").exists()
        weights = client_of(seed.home).snapshot().weights
        assert weights is not None
        assert weights.given_bytes <= 1.5 * weights.bytes_total  # three machines have the ends now, and share them
        first.end()
        assert asker.facts("chat", *PROMPT)["token_ids"] == alone["token_ids"]  # nobody needs the first one now
