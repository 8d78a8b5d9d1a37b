"""The first run as rows: where, how much and when to pause, say hello. Nothing is fetched before it was said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.snapshot import DeviceView, FitView, OfferView, ProspectsView, Snapshot
from ui.bars import bar
from ui.figures import count, duration, gigabytes, size
from ui.ink import UNKNOWN, Row, clean, fit, row
from ui.store import Link
from ui.wording import pill, running_step

OFFERED = 3  # remembered swarms, each with a digit
STARTER = "starter"
STEP_BYTES = 500 * 10**6
HELLO = "Why do fish swim in shoals?"

# Setting, what it is called here, its value when on, and its value when off.
PAUSES = (
    ("pause_busy", "another program uses the device", "30", "0"),
    ("pause_on_battery", "on battery", "true", "false"),
    ("pause_above", "above 83 °C", "83", "0"),
    ("pause_active", "I am at the keyboard", "10", "0"),
)


@dataclass
class FirstState:
    """How far the person is, and what was chosen."""

    step: int = 0
    target: str = ""  # what to join
    create: tuple[str, str] | None = None  # name and model
    typed: str = ""
    memory_bytes: int | None = None  # None: what is free
    pauses: dict[str, bool] = field(default_factory=dict)
    cursor: int = 0
    problem: str = ""
    busy: str = ""
    prospects: ProspectsView = field(default_factory=ProspectsView)  # empty until the node has told them

    @property
    def remembered(self) -> tuple[OfferView, ...]:
        """The swarms that can be chosen by a digit."""
        return tuple(offer for offer in self.prospects.offers if offer.target != STARTER)[:OFFERED]

    def device(self, known: Snapshot | None) -> DeviceView | None:
        """What computes, or would."""
        return (known.hardware if known is not None else None) or self.prospects.device

    @property
    def where(self) -> str:
        """The first choice in words."""
        if self.create is not None:
            name, model = self.create
            return f"{name}, a swarm of {model}"
        return clean(self.target if not self.target.startswith("shoal:") else "by invite")


def pauses_from(config: Mapping[str, Any]) -> dict[str, bool]:
    """Which pauses are on in the node's settings; those that it does not know are left out."""
    return {name: bool(config[name]) for name, _, _, _ in PAUSES if name in config}


def first_rows(state: FirstState, known: Snapshot | None, width: int) -> list[Row]:
    """The whole page."""
    rows: list[Row] = [
        row(("≋ shoal", "b primary"), ("   Run a model none of us could hold alone.", "dim")),
        [],
        *_machine(known, state.device(known)),
        [],
    ]
    parts = (_where, _how_much, _hello)
    titles = ("Where?", "How much, and when to pause", "Say hello")
    chosen = (state.where, _much_words(state), "")
    for index, title in enumerate(titles):
        if index < state.step:
            rows.append(row(("✓", "b success"), f" {index + 1}  {chosen[index]}"))
        elif index > state.step:
            rows.append(row(("○", "dim"), (f" {index + 1}  {title}", "dim")))
        else:
            rows += [row(("▸", "b mine"), (f" {index + 1}  {title}", "b")), [], *parts[index](state, known, width), []]
    if state.problem:
        rows += [row((f"× {clean(state.problem)}", "error")), []]
    if state.busy:
        rows += [row(("◐ ", "primary"), clean(state.busy)), []]
    rows += [[]] if rows[-1] else []
    return [fit(line, width) for line in [*rows, row(("esc back · q leave, the node stays", "dim"))]]


def _machine(known: Snapshot | None, device: DeviceView | None) -> list[Row]:
    if known is None:
        return [row(("◐", "primary"), (" the node is coming up", "dim"))]
    told = [clean(device.name) or device.id] if device is not None else [clean(known.device or "")]
    if device is not None and device.memory_total_bytes:
        told.append(f"{gigabytes(device.memory_total_bytes)} GB")
        told.append(f"{gigabytes(device.memory_free_bytes)} GB free")
    machine = " · ".join(part for part in told if part)
    reach = {"verified": "others reach this machine", "unverified": "nobody has dialled in yet"}
    network = reach.get(known.network.reach, "not yet known how others reach this machine")
    ok, open_yet = ("✓", "b success"), ("○", "dim")
    return [
        row(ok, (f" {machine}", "dim")) if machine else row(open_yet, (" the device is being looked at", "dim")),
        row(ok if known.network.reach == "verified" else open_yet, (f" network: {network}", "dim")),
    ]


def _key(key: str, words: str, about: str) -> list[Row]:
    return [row("   ", (f" {key} ", "b background on primary"), " ", (words, "b")), row("       ", (about, "dim"))]


def _where(state: FirstState, known: Snapshot | None, width: int) -> list[Row]:
    starter = next((offer for offer in state.prospects.offers if offer.target == STARTER), OfferView(STARTER))
    small = f"{clean(starter.model) or 'a small model'} · {offer_words(starter)}"
    rows = _key("⏎", "Begin with the small starter model; others can join you", small)
    for number, offer in enumerate(state.remembered, 1):
        model = f" · {clean(offer.model)}" if offer.model else ""
        rows += _key(str(number), f"Go back to {clean(offer.target)}{model}", offer_words(offer))
    disk = state.prospects.disk_free_bytes
    rows += [
        row("       ", (f"{size(disk) if disk is not None else UNKNOWN} of disk free", "dim")),
        [],
        row("    ", ("j", "mine"), "  join by name, or simply paste an invite now"),
        row("    ", ("c", "mine"), "  create a swarm of another model"),
        row("    ", ("l", "mine"), "  look around first"),
    ]
    return rows


def offer_words(offer: OfferView) -> str:
    """What a choice means for this machine, said before anything is fetched."""
    fetch = f"{UNKNOWN if offer.fetch_bytes is None else size(offer.fetch_bytes)} to fetch"
    if offer.fetch_bytes == 0:
        fetch = "all is here"
    elif offer.fetch_bytes is not None and offer.target != STARTER:
        fetch = f"at most {fetch}"  # a member needs its own blocks and the ends alone
    return f"{fetch} · {fit_words(offer.fit)}"


def fit_words(fit: FitView | None) -> str:
    """Whether all of a model would fit here, so that it could be run alone."""
    if fit is None:
        return f"fits {UNKNOWN}"
    if fit.blocks >= fit.blocks_total:
        return "fits now"
    share = f"{fit.blocks} of {fit.blocks_total} blocks fit"
    return f"too large alone: {share}" if fit.too_large else f"fits with {size(fit.lacking_bytes)} more: {share}"


def _much_words(state: FirstState) -> str:
    on = [words for name, words, _, _ in PAUSES if state.pauses.get(name)]
    memory = "what is free" if state.memory_bytes is None else f"{gigabytes(state.memory_bytes)} GB"
    return f"{memory} · pauses: {', '.join(on) if on else 'only by hand'}"


def _how_much(state: FirstState, known: Snapshot | None, width: int) -> list[Row]:
    device = state.device(known)
    total = device.memory_total_bytes if device is not None else None
    mark = ("▸", "b mine") if state.cursor == 0 else (" ", "")
    if total:
        share = (state.memory_bytes if state.memory_bytes is not None else 0) / total
        told = f"{gigabytes(state.memory_bytes)} of {gigabytes(total)} GB"
        words = "what is free" if state.memory_bytes is None else told
        gauge = bar(share if state.memory_bytes is not None else None, 30, "mine")
        rows = [row(" ", mark, " memory   ", *gauge, ("  " + words, "b"), (" ← →", "dim"))]
        if device is not None and device.memory_free_bytes is not None and state.memory_bytes is not None:
            left = device.memory_free_bytes - state.memory_bytes
            told = f"leaves {gigabytes(left)} GB free for you" if left >= 0 else "more than is free now"
            rows.append(row(" " * 12, (told, "dim" if left >= 0 else "warning")))
    else:
        rows = [row(" ", mark, " memory   ", ("as much as is free", "b"))]
    rows.append([])
    shown = [entry for entry in PAUSES if entry[0] in state.pauses]
    for index, (name, words, _, _) in enumerate(shown, 1):
        mark = ("▸", "b mine") if state.cursor == index else (" ", "")
        box = ("■", "success") if state.pauses[name] else ("□", "dim")
        rows.append(row(" ", mark, " pause if " if index == 1 else " " * 10, box, f" {words}"))
    rows += [[], row("   ", (" ⏎ ", "b background on primary"), " ", ("Fine", "b"))]
    rows[-1] += row(("   ↑ ↓ and space change · later under 5 settings", "dim"))
    return rows


def _hello(state: FirstState, known: Snapshot | None, width: int) -> list[Row]:
    rows: list[Row] = []
    step = running_step(known) if known is not None else None
    if step is not None and step.done is not None and step.total:
        told = f"{size(step.done)} of {size(step.total)}" if step.total > 100_000 else f"{step.done} of {step.total}"
        left = f" · {duration(step.seconds_left)} left" if step.seconds_left is not None else ""
        gauge = bar(step.done / step.total, 30, "primary")
        rows.append(row(f"   {clean(step.title):<9}", *gauge, f"  {told}", (left, "dim")))
    elif known is not None:
        words = pill(Link("live"), known, 0.0)[0]
        rows.append(row("   ", words, (f"  {clean(known.reason)}", "dim")))
    blocks = f" · {count(known.blocks_total)} blocks" if known is not None and known.blocks_total else ""
    rows += [row("   ", (f"{clean(known.model)}{blocks}", "dim"))] if known is not None and known.model else []
    question = state.typed or HELLO
    return [
        *rows,
        [],
        row("   ", (" ⏎ ", "b background on primary"), " ", (question, "b"), ("   or type your own", "dim")),
    ]
