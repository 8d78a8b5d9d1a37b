"""Models by name, for all API families: the active swarm's, its adapters, and other swarms that this node has saved.

The name of another swarm stands for its model: the node visits that swarm to ask there (`app.node.visits`). Programs
with keys are not offered private ones, whose members know nothing of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.api.guard import TOKEN_OWNER
from app.api.keys import current_owner
from app.api.openai_errors import OpenAIError
from app.asker.reply_service import ReplyRequest
from app.snapshot.views import Snapshot, SwarmView


@dataclass(frozen=True)
class NamedModel:
    """What a model's name asks for."""

    swarm: str | None = None  # name and hash of another swarm than the active one
    adapter: str | None = None

    def asked_by(self, request: ReplyRequest) -> ReplyRequest:
        """Return the request, for this model."""
        return replace(request, swarm=self.swarm, adapter=self.adapter)


def other_swarms(snapshot: Snapshot) -> Mapping[str, SwarmView]:
    """Return the saved swarms that the present request may ask in besides the active one, by their models' names."""
    is_owner = current_owner() == TOKEN_OWNER
    others = [swarm for swarm in snapshot.swarms if not swarm.active and (is_owner or not swarm.private)]
    counts = Counter([snapshot.swarm, *(swarm.name for swarm in others)])
    return {swarm.name if counts[swarm.name] == 1 else swarm.pinned: swarm for swarm in others}


def named_model(snapshot: Snapshot, wanted: str) -> NamedModel:
    """Return what a model's name asks for; raises `OpenAIError` if there is no such model."""
    active = {snapshot.swarm, snapshot.model, *(swarm.pinned for swarm in snapshot.swarms if swarm.active)} - {"", None}
    others = other_swarms(snapshot)
    pinned = {name: swarm.pinned for name, swarm in others.items()} | {s.pinned: s.pinned for s in others.values()}
    name, plus, adapter = wanted.rpartition("+")  # an adapter's name has no plus
    choices = [(wanted, None), *([(name, adapter)] if plus and adapter else [])]
    for swarm, with_adapter in choices:
        if snapshot.swarm is not None and swarm in active:
            return NamedModel(None, with_adapter)
        if swarm in pinned:
            return NamedModel(pinned[swarm], with_adapter)
    if snapshot.swarm is None and not others:
        why = "this node is in no swarm: join one with `shoal join`, or create one with `shoal create`"
        raise OpenAIError(why, status=503, code="no_swarm")
    served = [*([] if snapshot.swarm is None else [snapshot.swarm]), *others]
    listed = ", ".join(repr(one) for one in served[:5]) + (", …" if len(served) > 5 else "")
    why = f"unknown model {wanted[:80]!r}: this node serves {listed}, the models of its swarms"
    raise OpenAIError(why, status=404, param="model", code="model_not_found")


def check_active(snapshot: Snapshot, wanted: str | None) -> None:
    """Raise `OpenAIError` unless a name is that of the active swarm's model without an adapter, or missing."""
    named = NamedModel() if wanted is None else named_model(snapshot, wanted)
    if named.adapter is not None:
        raise OpenAIError("adapters have no embeddings or tokens of their own: name the model alone", param="model")
    if named.swarm is not None:
        raise OpenAIError("embeddings and tokens are those of the active swarm's model: name that", param="model")
