"""The first run as rows: where to go, how much memory and when to pause, a first question.

Nothing is downloaded before the second step is confirmed. The offers of the first step are drawn by
`ui.draw.first_run_offers`; keys and requests are handled by `ui.screens.first_run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from app.core.terminal_text import one_line
from app.snapshot.views import DeviceView, OfferView, ProspectsView, Snapshot, StepView
from ui.draw.bars import bar
from ui.draw.first_run_offers import STARTER, choice_rows, ordered, target_words
from ui.draw.numbers import count, duration, gigabytes, memory, memory_of, progress, size
from ui.draw.rows import Row, fit, row, tidy, wrap
from ui.draw.state_line import pill, running_step
from ui.state.store import ConnectionState

STEP_BYTES = 500 * 10**6
SHARE = 0.8  # of the free memory that is proposed for hosting
_FRAME_ROWS = 12  # rows of the page besides those of the open step
HELLO = "Why do fish swim in shoals?"

# Setting, its name on this page, its value when on, its value when off.
PAUSES = (
    ("pause_busy", "another program uses the device", "30", "0"),
    ("pause_on_battery", "on battery", "true", "false"),
    ("pause_above", "above 83 °C", "83", "0"),
    ("pause_active", "I am at the keyboard", "10", "0"),
    ("pause_full_screen", "a program fills the screen, like a game", "true", "false"),
)
_RULES = {"pause_on_battery": "pause_battery", "pause_above": "pause_heat"}  # the others are named as their settings


@dataclass
class FirstState:
    """The current step and the choices so far."""

    step: int = 0
    target: str = ""  # name or invite of the swarm to join
    preview: OfferView | None = None  # what the node found out about `target`
    create: tuple[str, str] | None = None  # name and model of the swarm to create
    private: bool = False  # the swarm to create takes only those who are invited
    typed: str = ""
    memory_bytes: int | None = None  # None: as much as is free
    pauses: dict[str, bool] = field(default_factory=dict)
    public: bool | None = None  # look for swarms in the public directory; None until the settings have arrived
    cursor: int = 0
    problem: str = ""
    busy: str = ""
    prospects: ProspectsView = field(default_factory=ProspectsView)  # empty until the node has answered
    order: tuple[str, ...] = ()  # targets of the offers, in the order of their keys
    trouble: str = ""  # why the node could not list the offers

    def take(self, prospects: ProspectsView) -> None:
        """Replace the offers; an offer that is already listed keeps its key."""
        self.prospects, self.trouble = prospects, ""
        self.order = ordered(self.order, prospects)

    @property
    def choices(self) -> dict[int, OfferView]:
        """Offers that have a key, by their place in the order: 0 is enter, 1 to 9 are digits."""
        offers = {offer.target: offer for offer in self.prospects.offers}
        return {index: offers[target] for index, target in enumerate(self.order[:10]) if target in offers}

    @property
    def toggles(self) -> list[str]:
        """What the space key changes in the second step, from top to bottom."""
        names = [name for name, _, _, _ in PAUSES if name in self.pauses]
        names += ["private"] if self.create is not None else []
        return [*names, "public"] if self.public is not None else names

    def device(self, known: Snapshot | None) -> DeviceView | None:
        """The device that computes or, before a swarm is joined, the one that would."""
        return (known.hardware if known is not None else None) or self.prospects.device

    @property
    def where(self) -> str:
        """The choice of the first step in words."""
        if self.create is not None:
            name, model = self.create
            offer = next((offer for offer in self.prospects.offers if offer.target == model), None)
            kind = "private swarm" if self.private else "swarm"
            return one_line(f"{name}, a {kind} of {offer.model if offer is not None else PurePath(model).name}")
        if self.preview is not None:
            return " · ".join(target_words(self.preview))
        return one_line(self.target if "shoal:" not in self.target.lower() else "the swarm of an invite")


def proposed_bytes(device: DeviceView | None) -> int | None:
    """Memory to propose for hosting: a share of what is free, so that other programs keep some; None if not known."""
    if device is None or not device.memory_free_bytes:
        return None
    return max(STEP_BYTES, int(SHARE * device.memory_free_bytes) // STEP_BYTES * STEP_BYTES)


def pauses_from(config: Mapping[str, Any]) -> dict[str, bool]:
    """On or off for each pause rule in the node's settings; rules that the node does not know are left out."""
    return {name: bool(config[name]) for name, _, _, _ in PAUSES if name in config}


def first_rows(
    state: FirstState, known: Snapshot | None, width: int, height: int, link: ConnectionState | None = None
) -> list[Row]:
    """The whole page: machine, the three steps with the current one open, problems, and keys."""
    rows: list[Row] = [
        row(("≋ shoal", "b primary"), ("   Run a model none of us could hold alone.", "dim")),
        [],
        *_machine(known, state, link),
        [],
    ]
    parts = (_where, _memory, _hello)
    titles = ("Where?", "How much, and when to pause", "Say hello")
    chosen = (state.where, _memory_words(state, known), "")
    lines = wrap(f"× {tidy(one_line(state.problem))}", width - 4, "error") if state.problem else []
    problem = [*(row("   ", *line) for line in lines), []] if lines else []
    for index, title in enumerate(titles):
        if index < state.step:
            first, *more = wrap(chosen[index], width - 7) or [[]]
            rows += [row(("✓", "b success"), f" {index + 1}  ", *first), *(row("     ", *line) for line in more)]
        elif index > state.step:
            rows.append(row(("○", "dim"), (f" {index + 1}  {title}", "dim")))
        else:
            rows += [
                row(("▸", "b mine"), (f" {index + 1}  {title}", "b")),
                [],
            ]
            if not (index == 1 and state.busy):  # these choices are made
                taken = len(problem) if state.problem else 2 if state.busy else 0
                rows += [*parts[index](state, known, width, height - _FRAME_ROWS - taken), []]
            rows += problem
            if state.busy:
                steps = [_step(known.preparing, width)] if known is not None and known.preparing is not None else []
                rows += [row(("   ◐ ", "primary"), one_line(state.busy)), *steps, []]
    rows += [[]] if rows[-1] else []
    keys = ["esc back"] if state.step == 1 and not state.busy else []
    keys += ["q quit, the node keeps running"] if state.step < 2 else ["esc look around first"]
    return [fit(line, width) for line in [*rows, row((" · ".join(keys), "dim"))]]


def _machine(known: Snapshot | None, state: FirstState, link: ConnectionState | None) -> list[Row]:
    device, disk = state.device(known), state.prospects.disk_free_bytes
    if link is not None and link.kind in ("away", "refused"):
        cure = f" · {link.next_step}" if link.next_step else ""
        return [row(("×", "b error"), (f" {tidy(one_line(link.text))}{cure}", "error"))]
    if known is None:
        return [row(("◐", "primary"), (" the node is starting", "dim"))]
    parts = [one_line(device.name) or device.id] if device is not None else [one_line(known.device or "")]
    if device is not None and device.memory_total_bytes:
        parts.append(f"{gigabytes(device.memory_total_bytes)} GB")
        parts.append(f"{gigabytes(device.memory_free_bytes)} GB free")
    machine = " · ".join(part for part in parts if part)
    reach = {"verified": "others can reach this machine", "unverified": "no peer has connected to this machine yet"}
    network = reach.get(known.network.reach, "not known yet if peers can reach this machine")
    room = f"{size(disk)} of disk free · " if disk is not None else ""
    ok, pending = ("✓", "b success"), ("○", "dim")
    return [
        row(ok, (f" {machine}", "dim")) if machine else row(pending, (" examining the device", "dim")),
        row(ok if known.network.reach == "verified" else pending, (f" {room}network: {network}", "dim")),
    ]


def _where(state: FirstState, known: Snapshot | None, width: int, height: int) -> list[Row]:
    keys = [
        row("    ", ("j", "mine"), "  join by name, or simply paste an invite now"),
        row("    ", ("c", "mine"), "  create a swarm of another model"),
        row("    ", ("l", "mine"), "  look around first"),
    ]
    if not state.choices:
        waiting = "examining this machine and looking for swarms on this network"
        words = state.trouble or waiting
        sign = ("×", "warning") if state.trouble else ("◐", "primary")
        rest = choice_rows(0, OfferView(STARTER), width) if state.trouble else []
        return [row("   ", sign, (f" {one_line(words)}", "dim")), *rest, [], *keys]
    rows: list[Row] = []
    room = height - len(keys) - 1
    for index, offer in state.choices.items():
        added = choice_rows(index, offer, width)
        if len(rows) + len(added) > room:
            more = row("       ", ("more in a taller window", "dim"))
            rows = [*rows[: room - 1], more]
            break
        rows += added
    speed = state.prospects.reading_bytes_per_s
    peers = "peers' figures and " if any(offer.members for offer in state.choices.values()) else ""
    about = f"estimates, from {peers}{size(round(speed))}/s measured here" if speed else ""
    if about and len(rows) + 2 <= room:
        rows += [[], row("       ", (about, "dim"))]
    return [*rows, [], *keys]


def _memory_words(state: FirstState, known: Snapshot | None) -> str:
    """The choices of the second step; a chosen pause that has no effect on this machine is named as such."""
    on = {name: words for name, words, _, _ in PAUSES if state.pauses.get(name)}
    blind = [words for name, words in on.items() if _without_effect(name, known)]
    works = [words for words in on.values() if words not in blind]
    if state.memory_bytes == 0:
        return "hosts nothing"
    room = "what is free" if state.memory_bytes is None else memory(state.memory_bytes)
    said = f"{room} · pauses: {', '.join(works) if works else 'only by hand'}"
    return f"{said} · without effect here: {', '.join(blind)}" if blind else said


def _memory(state: FirstState, known: Snapshot | None, width: int, height: int) -> list[Row]:
    device = state.device(known)
    total = device.memory_total_bytes if device is not None else None
    mark = ("▸", "b mine") if state.cursor == 0 else (" ", "")
    if total:
        share = (state.memory_bytes if state.memory_bytes is not None else 0) / total
        words = "what is free" if state.memory_bytes is None else memory_of(state.memory_bytes, total)
        gauge = bar(share if state.memory_bytes is not None else None, 30, "mine")
        rows = [row(" ", mark, " memory   ", *gauge, ("  " + words, "b"), (" ← →", "dim"))]
        if state.memory_bytes == 0:
            others = "no replies until others join and host it" if state.create is not None else "others must host it"
            rows.append(row(" " * 12, (f"hosts nothing: {others}", "warning")))
        elif device is not None and device.memory_free_bytes is not None and state.memory_bytes is not None:
            left = device.memory_free_bytes - state.memory_bytes
            free = f"{gigabytes(left)} of the {gigabytes(device.memory_free_bytes)} GB that are free"
            meaning = f"leaves you {free}" if left >= 0 else "more than is free now"
            rows.append(row(" " * 12, (meaning, "dim" if left >= 0 else "warning")))
    else:
        rows = [row(" ", mark, " memory   ", ("as much as is free", "b"))]
    rows.append([])
    words_of = {name: words for name, words, _, _ in PAUSES}
    for name in state.toggles:
        if name == "private":
            words = "only those whom you invite; cannot be changed later"
            rows.append(_toggle(state, name, "members", state.private, words))
        elif name == "public":
            words = "from anywhere, through the public libp2p directory"
            rows.append(_toggle(state, name, "be found", bool(state.public), words))
            rows.append(row(" " * 14, ("its nodes see this machine's address and hashes of swarm names", "dim")))
        else:
            label = "pause if" if name == state.toggles[0] else ""
            line = _toggle(state, name, label, state.pauses[name], words_of[name])
            rows.append(fit([*line, (_without_effect(name, known), "dim")], width))
    if len(rows) + 2 > height:
        rows.remove([])
    rows += [[], row("   ", (" ⏎ ", "b background on primary"), " ", ("Fine", "b"))]
    rows[-1] += row(("   ↑ ↓ and space change · later in tab 6, settings", "dim"))
    return rows


def _toggle(state: FirstState, name: str, label: str, is_on: bool, words: str) -> Row:
    mark = ("▸", "b mine") if state.cursor == state.toggles.index(name) + 1 else (" ", "")
    box = ("■", "success") if is_on else ("□", "dim")
    return row(" ", mark, f" {label:<8} ", box, f" {words}")


def _without_effect(setting: str, known: Snapshot | None) -> str:
    """The reason why a pause rule cannot work on this machine; empty if it can."""
    rules = () if known is None else known.courtesy.rules
    rule = next((rule for rule in rules if rule.code == _RULES.get(setting, setting)), None)
    return "" if rule is None or rule.available else f" · without effect: {one_line(rule.text) or 'no such sensor'}"


def _step(step: StepView, width: int) -> Row:
    """A step that is running: its title, a gauge, how far it is, and the time left."""
    share = step.done / step.total if step.done is not None and step.total else None
    gauge = bar(share, max(8, min(30, width - 60)), "primary")
    line = row(f"   {one_line(step.title):<9} ", *gauge, f"  {progress(step.done, step.total)}")
    if step.seconds_left is not None and step.done != step.total:
        line += row((f" · {duration(step.seconds_left)} left", "dim"))
    return line


def _hello(state: FirstState, known: Snapshot | None, width: int, height: int) -> list[Row]:
    rows: list[Row] = []
    step = running_step(known) if known is not None else None
    if step is not None and step.done is not None and step.total:
        rows.append(_step(step, width))
    elif known is not None:
        words = pill(ConnectionState("live"), known, 0.0)[0]
        indent = 5 + len(words)
        told = wrap(one_line(known.reason), max(8, width - indent), "dim") or [[]]
        rows += [row("   ", words, ("  ", "dim"), *told[0]), *(row(" " * indent, *line) for line in told[1:])]
    blocks = f" · {count(known.blocks_total)} blocks" if known is not None and known.blocks_total else ""
    rows += [row("   ", (f"{one_line(known.model)}{blocks}", "dim"))] if known is not None and known.model else []
    question = state.typed or HELLO
    return [
        *rows,
        [],
        row("   ", (" ⏎ ", "b background on primary"), " ", (question, "b"), ("   or type your own", "dim")),
    ]
