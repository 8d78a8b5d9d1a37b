"""Gets the text of a training job that this node joins: from members that have it, and from files of this node's own.

What was fetched rests among the states while that goes on, and is in the job's folder at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import trio

from app.core.canonical_json import canonical
from app.core.errors import AppError
from app.core.signal import Signal
from app.core.units import format_size
from app.rounds.job_search import JobSearch
from app.rounds.place import TrainPlace
from app.rounds.train_store import OWN_DATA_FILE, JoinWords, StoredTraining, TrainStore
from app.training.reading import TextReading
from p2p.errors import DeadlineExceeded

log = logging.getLogger("shoal.rounds")

LOOK_S = 10.0  # between two looks whether a member that has the text is still there
HOLDERS_AGAIN_S, HOLDERS_AGAIN_MOST_S = 10.0, 600.0  # until members are asked again for the text of a job


class _NotGiven(AppError):
    """Members that said that they have a job's text did not give it."""


class JobText:
    """The text of one job while it is fetched."""

    def __init__(
        self, place: TrainPlace, store: TrainStore, search: JobSearch, reading: TextReading, job: StoredTraining
    ) -> None:
        self._place, self._store, self._search, self._reading, self._job = place, store, search, reading, job
        self._record, self._run = job.record, job.record.id[:16]
        self._fetches = self._all_asked = False
        self._holders: list[str] = []  # members that say that they have the text
        self._found = Signal()

    @property
    def waiting(self) -> str:
        """What is waited for, in words; empty if nothing is."""
        if not self._fetches:
            return ""
        if not self._holders:
            return "waits for a member that has its text"
        states, parts = self._place.states, self._record.parts
        here, whole = states.present_bytes(parts), sum(part.size_bytes for part in set(parts))
        return f"fetches its text ({format_size(here)} of {format_size(whole)})"

    async def get(self, words: JoinWords, holders: Sequence[str]) -> None:
        """Let all of the text be in the job's folder; without holders, it is waited until some have it.

        `words` name the files of this node's own text, if the job's members have such. Raises what keeps it from that.
        """
        try:
            await self._keep_present()
            texts = await self._fetched(holders)
            if self._record.own_data:
                texts |= await self._own(words, texts)
            await trio.to_thread.run_sync(self._store.create, self._job.raw, texts)
            await self.note(self._holders)
            await trio.to_thread.run_sync(self._store.end_joining, self._job)
        except trio.Cancelled:  # left, or the node ends
            with trio.CancelScope(shield=True):
                await self._place.states.forget(self._run)
            raise

    async def note(self, holders: Sequence[str]) -> None:
        """Note who has the text, besides those that had it before: this node's island greets them first."""
        known = await trio.to_thread.run_sync(self._store.acquaintances, self._job)
        if others := {*known, *holders} - {self._place.network.peer_id}:
            await trio.to_thread.run_sync(self._store.note_acquaintances, self._job, others)

    async def _keep_present(self) -> None:
        """Let the states have what is in the job's folder of the texts that all members have."""
        for path in [self._job.folder / name for name in self._record.texts]:
            with suppress(FileNotFoundError):
                data = await trio.to_thread.run_sync(path.read_bytes)
                await self._place.states.keep(self._run, data)

    async def _fetched(self, named: Sequence[str]) -> dict[str, bytes]:
        """Return the texts that all members have, from members as far as they are not here; raises `AppError`.

        `named` say that they have them. Without these it is tried again until somebody has given them.
        """
        self._fetches = True
        while True:
            self._holders, self._all_asked = list(named), False
            try:
                fetched = await self._from_holders()
            except _NotGiven as error:
                if named:
                    raise
                log.info("%s", error)
            else:
                self._fetches = False
                return dict(zip(self._record.texts, fetched, strict=True))

    async def _from_holders(self) -> list[bytes]:
        """Return the texts, while more members that have them are looked for: anybody can say that it has them."""
        states, parts, fetched, failure = self._place.states, self._record.parts, None, None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_for_holders)
            nursery.start_soon(self._follow, nursery.cancel_scope)
            try:
                await self._found.wait_for(lambda: self._has_holder() or not states.absent_bytes(parts))
                fetched = await states.fetch(self._run, parts, self._holders, is_patient=True, waits=True)
            except Exception as error:
                failure = error  # raised below, outside of the nursery, which would wrap it
            nursery.cancel_scope.cancel()
        name = self._record.name
        again = f"try again with `shoal train join {name}`"
        if isinstance(failure, DeadlineExceeded):
            raise _NotGiven(f"the text of {name} comes too slowly from the members that have it: {again}")
        if failure is not None:
            raise failure
        if fetched is None:
            raise _NotGiven(f"no member that has the text of {name} is in the swarm any more: {again}")
        return fetched

    async def _look_for_holders(self) -> None:
        """Ask all members but those that are known to have the text, and again after a while, until cancelled."""

        def take(peer: str) -> None:
            if peer not in self._holders:
                self._holders.append(peer)
                self._found.notify()

        again_s = HOLDERS_AGAIN_S
        while True:
            others = [peer for peer in self._place.members() if peer not in self._holders]
            await self._search.find_holders(self._record, others, take)
            self._all_asked = True
            await trio.sleep(again_s)
            again_s = min(2 * again_s, HOLDERS_AGAIN_MOST_S)

    async def _follow(self, fetch: trio.CancelScope) -> None:
        """End the fetch once all members were asked and nobody who was found is one any more."""
        states, parts = self._place.states, self._record.parts
        while not (self._all_asked and self._holders) or self._has_holder() or not states.absent_bytes(parts):  # noqa: ASYNC110
            await trio.sleep(LOOK_S)
        fetch.cancel()

    def _has_holder(self) -> bool:
        return any(map(self._place.is_member, self._holders))

    async def _own(self, words: JoinWords, texts: dict[str, bytes]) -> dict[str, bytes]:
        """Return the files of this node's own text, and what it says of it."""
        from app.rounds.founding import own_texts, source_of

        given = (self._record, words.data, texts["tokenizer.json"], texts.get("held"))
        found = await self._reading.run(words.data, own_texts, *given)
        return found | {OWN_DATA_FILE: canonical({"source": source_of(words.data), "licence": words.licence})}
