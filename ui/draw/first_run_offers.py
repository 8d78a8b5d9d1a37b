"""The first question of the first run: where to go. Every choice says what it fetches, whether it fits, how fast it is.

Choices keep their keys while more of them are found: what is pressed is what was read.
"""

from __future__ import annotations

from collections.abc import Iterable

from app.core.terminal_text import one_line
from app.snapshot.views import FitView, OfferView, ProspectsView
from ui.draw.numbers import plural, rate, size
from ui.draw.rows import UNKNOWN, Row, row, width_of

STARTER = "starter"
_FOUND = {
    "lan": "found on this network",
    "direct": "found through a peer",
    "relayed": "found through a peer, by relay",
}
_INDENT = " " * 7


def ordered(order: Iterable[str], prospects: ProspectsView) -> tuple[str, ...]:
    """The choices in the order of their keys: at first what is nearby comes first, then what is new comes last."""
    kept = tuple(order)
    nearby = [offer.target for offer in prospects.offers if offer.nearby]
    others = [offer.target for offer in prospects.offers if not offer.nearby]
    return (*kept, *(target for target in (*nearby, *others) if target not in kept))


def key_of(index: int) -> str:
    """What is pressed for a choice: enter, then digits."""
    return "⏎" if index == 0 else str(index)


def choice_rows(index: int, offer: OfferView, width: int) -> list[Row]:
    """One choice with all that is known of it."""
    return [
        row("   ", (f" {key_of(index)} ", "b background on primary"), " ", *_title(offer)),
        *(row(_INDENT, *line) for line in _about(offer, width - len(_INDENT))),
    ]


def _title(offer: OfferView) -> Row:
    name = one_line(offer.target)
    if offer.target == STARTER:
        return row(("Begin with the small starter model; others can join you", "b"))
    if offer.nearby:
        return row((f"Join {name}", "b"), (f"   {_FOUND.get(offer.nearby, '')}", "success"))
    return row((f"Go back to {name}", "b"), (f" · {one_line(offer.model)}" if offer.model else "", "dim"))


def _about(offer: OfferView, width: int) -> list[Row]:
    if offer.target == STARTER:
        model = one_line(offer.model) or "a small model"
        return [row((f"{model} · {fetch_words(offer)} · {fit_words(offer.fit)}", "dim"), *_speed(offer, " · "))]
    fits = row((f"{fetch_words(offer)} · {fit_words(offer.fit)}", "dim"))
    alone = _speed(offer, "alone ")
    joined = [*fits, (" · ", "dim"), *alone] if alone else fits
    means = [joined] if width_of(joined) <= width else [fits, alone]
    if not offer.nearby:
        return means
    members = plural(offer.members, "member") if offer.members is not None else f"{UNKNOWN} members"
    model = one_line(offer.model) or "its model is not known yet"
    return [
        row(f"{model} · {members}", *_there(offer)),
        *means,
    ]


def _there(offer: OfferView) -> Row:
    if offer.tokens_per_s is not None:
        return row(" · about ", (f"{rate(offer.tokens_per_s)} tok/s", "b"), " for you")
    if offer.missing_block is not None:
        return row((f" · block {offer.missing_block} has no holder yet", "warning"))
    return row((" · tok/s not known yet", "dim"))


def _speed(offer: OfferView, lead: str) -> Row:
    if offer.alone_tokens_per_s is None:
        return []
    return row((f"{lead}about {rate(offer.alone_tokens_per_s)} tok/s", "dim"))


def fetch_words(offer: OfferView) -> str:
    """What a choice would bring over the network."""
    if offer.fetch_bytes is None:
        return f"{UNKNOWN} to fetch"
    if offer.fetch_bytes == 0:
        return "all is here"
    most = "" if offer.target == STARTER else "at most "  # a member needs its own blocks and the ends alone
    return f"{most}{size(offer.fetch_bytes)} to fetch"


def fit_words(fit: FitView | None) -> str:
    """Whether all of a model would fit here, so that it could be run alone."""
    if fit is None:
        return f"fits {UNKNOWN}"
    if fit.blocks >= fit.blocks_total:
        return "fits now"
    share = f"{fit.blocks} of {fit.blocks_total} blocks fit"
    return f"too large alone: {share}" if fit.too_large else f"fits with {size(fit.lacking_bytes)} more: {share}"
