"""`shoal web`: the dashboard in a browser on this machine, by a link that works once; read-only links for others.

`app.web` serves the page; each page gets a dashboard process of its own, which is this command with `--screen`.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.command import Command, print_json
from app.cli.parser import number_argument
from app.core.errors import AppError, UsageError

if TYPE_CHECKING:
    from app.web.links import Links, Mode
    from app.web.screen import ScreenProcess

PORT = 7466
VIEW_MARKER = "READ-ONLY VIEW · keys and mouse do nothing here"
_SCREENS = ("own", "view")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the port and the links."""
    words = f"port of the page on 127.0.0.1; 0 means any free one (default: {PORT}, or a free one if it is taken)"
    parser.add_argument("--port", metavar="P", type=number_argument(int, 0, 65535), help=words)
    words = "print a link for others too: a view of the overview and the swarm, without keys or mouse"
    parser.add_argument("--share", action="store_true", help=words)
    parser.add_argument("--open", action="store_true", help="open the link in the browser")
    parser.add_argument("--screen", choices=_SCREENS, help=argparse.SUPPRESS)
    parser.add_argument("--tab", choices=("overview", "swarm"), default="overview", help=argparse.SUPPRESS)


def run_web(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C; prints the links first."""
    if arguments.screen is not None:
        return _run_screen(arguments.home, arguments.screen, arguments.tab)
    import trio

    trio.run(_serve, arguments)
    return 0


def _run_screen(home: Path, mode: str, tab: str) -> int:
    """Show one dashboard over the standard streams, as a child of `shoal web`."""
    if "TEXTUAL_DRIVER" not in os.environ:
        raise UsageError("--screen is for the processes that `shoal web` starts")
    from app.cli.dashboard import HomeConnector, WatchConnector
    from ui.app import Dashboard
    from ui.state.store import Store

    if mode == "own":
        dashboard = Dashboard(HomeConnector(home), folder=home)
    else:
        dashboard = Dashboard(WatchConnector(home), store=Store(marker=VIEW_MARKER))
        dashboard.asked_first_run = True
        dashboard.first_tab = tab
    dashboard.run()
    return dashboard.return_code or 0


async def _serve(arguments: argparse.Namespace) -> None:
    import trio

    from app.api import server
    from app.config.home import Home
    from app.web.links import Links
    from app.web.screen import open_screen
    from app.web.server import WebServer
    from p2p.platform import module_command, stop_signals

    home, links = Home.open(arguments.home).folder, Links(trio.current_time)
    try:
        port = PORT if arguments.port is None else arguments.port
        sock = server.open_socket(port, explicit=arguments.port is not None)
    except server.PortInUse:
        raise AppError(f"port {arguments.port} is taken: choose another --port, or 0 for any") from None
    url = server.url_of(sock)

    async def start(mode: Mode, tab: str, width: int, height: int) -> ScreenProcess:
        command = module_command("app.cli", "web", "--home", str(home), "--screen", mode, "--tab", tab)
        return await open_screen(command, os.environ, width, height)

    with contextlib.ExitStack() as stack, trio.open_signal_receiver(*stop_signals()) as signals:

        async def until_signal() -> None:
            async for _ in signals:
                return

        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve, WebServer(links, start), sock, until_signal)
            stack.enter_context(_announced(arguments, url, links))


@contextlib.contextmanager
def _announced(arguments: argparse.Namespace, url: str, links: Links) -> Iterator[None]:
    """Print the links, and open the first one if that is wanted; tidies up at the end."""
    facts = {"link": f"{url}/#code={links.one_time_code()}"}
    if arguments.share:
        facts["view"] = f"{url}/#view={links.view_token()}"
    if arguments.json:
        print_json(facts)
    else:
        print(f"the dashboard, once and within ten minutes: {facts['link']}")
        if arguments.share:
            print(f"read-only, for others on this machine: {facts['view']}")
        print("Ctrl-C ends both; the node keeps running")
    sys.stdout.flush()
    with _opened(facts["link"]) if arguments.open else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _opened(link: str) -> Iterator[None]:
    """Open a link in the browser by way of a private file: other users see the words of a command, but not a file."""
    import webbrowser

    page = f'<!doctype html><meta http-equiv="refresh" content="0;url={html.escape(link)}">'
    with tempfile.TemporaryDirectory(prefix="shoal-web-") as folder:
        file = Path(folder) / "open.html"
        file.write_text(page, "utf-8")
        webbrowser.open(file.as_uri())
        yield


COMMANDS = (Command("web", "show the dashboard in a browser on this machine", run_web, add_arguments, True),)
