"""The offers of the first run: for each swarm its download size, whether the model fits here, and its expected speed.

An offer keeps its key while more swarms are found, so that a key never means another offer than the one just read.
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
    """Targets in the order of their keys: first those in `order`, then new ones, swarms nearby before the others."""
    kept = tuple(order)
    nearby = [offer.target for offer in prospects.offers if offer.nearby]
    others = [offer.target for offer in prospects.offers if not offer.nearby]
    return (*kept, *(target for target in (*nearby, *others) if target not in kept))


def key_of(index: int) -> str:
    """The key that chooses an offer: enter for the first, then digits."""
    return "⏎" if index == 0 else str(index)


def choice_rows(index: int, offer: OfferView, width: int) -> list[Row]:
    """Rows of one offer: key and title, then what is known of it."""
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


def target_words(offer: OfferView) -> list[str]:
    """Where an invite or a name leads: the swarm, private or not, its model, its size and its members."""
    parts = [one_line(offer.target) + (" (private)" if offer.private else "")]
    parts += [one_line(offer.model)] if offer.model else []
    parts += [size(offer.size_bytes)] if offer.size_bytes else []
    if offer.members is not None:
        return [*parts, plural(offer.members, "member")]
    return [*parts, "members answer only those who are invited" if offer.private else "no member answers now"]


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
    """Size of the download of an offer, in words."""
    if offer.fetch_bytes is None:
        return f"{UNKNOWN} to fetch"
    if offer.fetch_bytes == 0:
        return "nothing to fetch"
    most = "" if offer.target == STARTER else "at most "  # a member needs only its own blocks, embedding and head
    return f"{most}{size(offer.fetch_bytes)} to fetch"


def fit_words(fit: FitView | None) -> str:
    """Part of a model that fits on this machine, in words: if all of it does, the model can run here alone."""
    if fit is None:
        return f"fits {UNKNOWN}"
    if fit.blocks >= fit.blocks_total:
        return "fits now"
    share = f"{fit.blocks} of {fit.blocks_total} blocks fit"
    return f"too large alone: {share}" if fit.too_large else f"fits with {size(fit.lacking_bytes)} more: {share}"
