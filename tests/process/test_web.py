"""`shoal web` with real dashboards: from the first run to a chat in Chromium, and a read-only view without one.

The protocol itself is tested in `tests/app/web`. `SHOAL_UPDATE_SCREENS=1` writes the picture of the docs anew.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import trio
from trio_websocket import open_websocket_url

from tests.process.chromium import PROGRAM, Chromium, Page
from tests.process.node_process import FRESH, PATIENCE_S, Place, Serving, start, wait_until

PICTURE = Path(__file__).resolve().parent.parent.parent / "docs" / "web.png"
_ESCAPE = re.compile(r"\x1b(\[[0-9;?<=>$]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|.)")

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed")


@contextmanager
def web(place: Place) -> Iterator[dict[str, str]]:
    """A `shoal web` process, ended with Ctrl-C; yields its links."""
    out, out_end = os.pipe()
    with open(os.devnull) as nothing, os.fdopen(out_end, "w") as output, os.fdopen(out) as lines:
        arguments = ["web", "--port=0", "--share", "--json"]
        process = start(arguments, place.environment(), (nothing, output, output), FRESH)
        output.close()
        try:
            links: dict[str, str] = json.loads(lines.readline())
            yield links
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()


def test_a_view_shows_the_dashboard_and_ends_with_the_server(tmp_path: Path) -> None:
    """No node runs, and a view starts none."""
    place = Place(tmp_path / "home", tmp_path / "cache")

    async def look(links: dict[str, str]) -> None:
        url, _, token = links["view"].partition("/#view=")
        shown = ""
        async with open_websocket_url(f"ws{url[4:]}/screen") as page:
            await page.send_message(json.dumps({"view": token, "width": 100, "height": 30}))
            with trio.fail_after(PATIENCE_S):
                while "READ-ONLY VIEW" not in shown or "no node runs here now" not in shown:
                    message = await page.get_message()
                    shown += _ESCAPE.sub("", message.decode()) if isinstance(message, bytes) else ""

        assert str(tmp_path) not in shown

    with web(place) as links:
        trio.run(look, links)
    assert not (place.home / "node.json").exists()


def test_a_dashboard_ends_with_a_server_that_was_killed(tmp_path: Path) -> None:
    place = Place(tmp_path / "home", tmp_path / "cache")
    with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as output:
        arguments = ["web", "--port=0", "--share", "--json"]
        process = start(arguments, place.environment(), (nothing, output, nothing), FRESH)

        def said() -> str:
            output.seek(0)
            return output.read()

        wait_until(lambda: said().endswith("\n"), "the links are printed")
        url, _, token = json.loads(said())["view"].partition("/#view=")

        async def open_and_kill() -> list[psutil.Process]:
            async with open_websocket_url(f"ws{url[4:]}/screen") as page:
                await page.send_message(json.dumps({"view": token, "width": 100, "height": 30}))
                with trio.fail_after(PATIENCE_S):
                    while not isinstance(await page.get_message(), bytes):
                        pass
                children: list[psutil.Process] = psutil.Process(process.pid).children()
                process.kill()
            return children

        [child] = trio.run(open_and_kill)
        process.wait()
        wait_until(lambda: not child.is_running() or child.status() == "zombie", "the dashboard has ended")


@needs_chromium
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_from_the_first_run_to_a_chat_in_a_browser(tmp_path: Path) -> None:
    host = Place(tmp_path / "host", tmp_path / "cache")
    guest = Place(tmp_path / "guest", tmp_path / "cache")
    assert host.shoal("create", "reef", "--model", "tiny-random").status == 0
    with Serving(host, "--discovery=invite", "--device=cpu", max_vram="1GB") as serving:
        serving.ready()
        invite = str(host.facts("invite")["invite"])
        with node_stopped(guest), web(guest) as links, Chromium(tmp_path / "profile") as browser:
            page = browser.open(links["link"])
            _first_run(page, invite)
            _chat(page)
            _used_link_and_reload(browser, page, links)
            _view(browser, links)


WRITTEN = (  # pieces that are written to a terminal of 10 by 3 cells, and its text afterwards
    (["ab\x1b[2;3Hcd\x1b[99;99Hz"], "ab\n  cd\n         z"),
    (["\x1b[", "3", "8;2;1;2", ";3mX\x1b", "[0mY"], "XY\n\n"),
    (["日本x\x1b[2;1H━é"], "日本x\n━é\n"),
    (["much longer than a row"], "much longe\n\n"),
    (["a\x1b[38;2mb\x1b[48;5mc\x1b[;;;md"], "abcd\n\n"),
    (["\x1b]0;a title\x07\x1b]8;;http://x\x1b\\link\x1b]52;c;!!\x07"], "link\n\n"),
    (["\x1b[-5;-5Hx", "\x1b[99999999999999999999Ay"], None),
    (["\x1b[" + "9" * 5000 + "m", "\x1bP" + "x" * 5000], None),
)
PRESSED = (
    ({"key": "c", "ctrlKey": True}, "\x03"),
    ({"key": "ArrowUp"}, "\x1b[A"),
    ({"key": "ArrowUp", "ctrlKey": True}, "\x1b[1;5A"),
    ({"key": "Tab", "shiftKey": True}, "\x1b[Z"),
    ({"key": "F5"}, "\x1b[15~"),
    ({"key": "x", "altKey": True}, "\x1bx"),
    ({"key": "x"}, None),  # text comes by the input element
    ({"key": "v", "ctrlKey": True}, None),  # the browser's paste
    ({"key": "c", "metaKey": True}, None),
)


@needs_chromium
def test_the_page_draws_and_sends_what_terminals_do_and_needs_a_link(tmp_path: Path) -> None:
    place = Place(tmp_path / "home", tmp_path / "cache")
    with web(place) as links, Chromium(tmp_path / "profile") as browser:
        page = browser.open(links["link"].partition("#")[0])
        page.until("This page opens with a link")
        for pieces, expected in WRITTEN:
            script = f"(() => {{ const g = new Grid(10, 3); {json.dumps(pieces)}.forEach((p) => g.write(p)); "
            text = page.run(script + "return g.text(); })()")
            assert expected is None or text == expected, pieces
            assert len(text.split("\n")) == 3
        for event, sequence in PRESSED:
            assert page.run(f"keySequence({json.dumps(event)})") == sequence, event


@contextmanager
def node_stopped(place: Place) -> Iterator[None]:
    """Stops the node that the dashboard started."""
    try:
        yield
    finally:
        if (place.home / "node.json").exists():
            assert place.shoal("stop").status == 0


def _first_run(page: Page, invite: str) -> None:
    page.until("▸ 1  Where?", seconds=120)
    page.until("pause")  # the settings are known
    page.paste(invite)
    page.until("✓ 1")
    page.press("Enter")
    page.until("▸ 3  Say hello", seconds=120)


def _chat(page: Page) -> None:
    page.type("hello there")
    page.press("Enter")
    shown = page.until(" tokens · ", seconds=120)
    assert "hello there" in shown
    page.press("Escape")  # stops the reply
    page.until(" stopped")
    page.press("Escape")
    page.type("1")
    page.until("uptime")
    picture = page.picture()
    assert len(picture) > 10_000
    if os.environ.get("SHOAL_UPDATE_SCREENS"):
        PICTURE.write_bytes(picture)


def _used_link_and_reload(browser: Chromium, page: Page, links: dict[str, str]) -> None:
    assert page.run("location.hash") == ""
    browser.open(links["link"]).until("This link was used already")
    page.reload()
    page.until("reef#")


def _view(browser: Chromium, links: dict[str, str]) -> None:
    view = browser.open(links["view"])
    view.until("reef#")
    assert "READ-ONLY VIEW" in view.text()
    view.type("3")
    view.press("Enter")
    view.click(300, 60)
    view.run("document.querySelector('[data-tab=swarm]').click()")
    shown = view.until("peers  ")
    assert "READ-ONLY VIEW" in shown
    assert "hello there" not in shown
