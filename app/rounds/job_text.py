"""Gets the text of a training job that this node joins: from members that have it, and from files of this node's own.

What was fetched rests among the states while that goes on, and is in the job's folder at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import trio

from app.core.canonical_json import canonical
from app.core.errors import AppError
from app.core.units import format_size
from app.rounds.job_search import ASK_S, FIND_S, JobSearch
from app.rounds.place import TrainPlace
from app.rounds.train_store import OWN_DATA_FILE, JoinWords, StoredTraining, TrainStore

LOOK_S = 10.0  # between two looks whether a member that has the text is still there
HOLDERS_AGAIN_S, HOLDERS_AGAIN_MOST_S = 10.0, 600.0  # until members are asked again for the text of a job


class JobText:
    """The text of one job while it is fetched."""

    def __init__(self, place: TrainPlace, store: TrainStore, search: JobSearch, job: StoredTraining) -> None:
        self._place, self._store, self._search, self._job = place, store, search, job
        self._record, self._run = job.record, job.record.id[:16]
        self._lacks_holders = self._fetches = False

    @property
    def waiting(self) -> str:
        """What is waited for, in words; empty if nothing is."""
        if self._lacks_holders:
            return "waits for a member that has its text"
        if self._fetches:
            states, parts = self._place.states, self._record.parts
            here, whole = states.present_bytes(parts), sum(part.size_bytes for part in set(parts))
            return f"fetches its text ({format_size(here)} of {format_size(whole)})"
        return ""

    async def get(self, words: JoinWords, holders: Sequence[str]) -> None:
        """Let all of the text be in the job's folder; without holders, members are asked for some until there are any.

        `words` name the files of this node's own text, if the job's members have such. Raises what keeps it from that.
        """
        try:
            await self._keep_present()
            if not holders:
                holders = await self._found()
            texts = await self._fetched(holders)
            if self._record.own_data:
                texts |= await self._own(words, texts)
            await trio.to_thread.run_sync(self._store.create, self._job.raw, texts)
            await self.note(holders)
            await trio.to_thread.run_sync(self._store.end_joining, self._job)
        except trio.Cancelled:  # left, or the node ends
            with trio.CancelScope(shield=True):
                await self._place.states.forget(self._run)
            raise

    async def note(self, holders: Sequence[str]) -> None:
        """Note who has the text: this node's island greets them first."""
        if others := {*holders} - {self._place.network.peer_id}:
            await trio.to_thread.run_sync(self._store.note_acquaintances, self._job, others)

    async def _keep_present(self) -> None:
        """Let the states have what is in the job's folder of the texts that all members have."""
        for path in [self._job.folder / name for name in self._record.texts]:
            with suppress(FileNotFoundError):
                data = await trio.to_thread.run_sync(path.read_bytes)
                await self._place.states.keep(self._run, data)

    async def _found(self) -> Sequence[str]:
        """Return members that have what is not here of the text, once there are any."""
        again_s, holders = HOLDERS_AGAIN_S, list[str]()
        self._lacks_holders = True
        while not holders and self._place.states.absent_bytes(self._record.parts):
            target, members = self._record.id.hex(), self._place.members()
            found = await self._search.find(target, members, ask_s=ASK_S, within_s=FIND_S)
            holders = [peer for one in found.jobs.values() for peer in one.holders]
            if not holders:
                await trio.sleep(again_s)
                again_s = min(2 * again_s, HOLDERS_AGAIN_MOST_S)
        self._lacks_holders = False
        return holders

    async def _fetched(self, holders: Sequence[str]) -> dict[str, bytes]:
        """Return the texts that all members have, from holders as far as they are not here; raises `AppError`."""
        name, fetched, failure = self._record.name, None, None
        self._fetches = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow, holders, nursery.cancel_scope)
            try:
                fetched = await self._place.states.fetch(self._run, self._record.parts, holders)
            except Exception as error:
                failure = error  # raised below, outside of the nursery, which would wrap it
            nursery.cancel_scope.cancel()
        self._fetches = False
        again = f"try again with `shoal train join {name}`"
        if isinstance(failure, trio.TooSlowError):
            raise AppError(f"the text of {name} comes too slowly from the members that have it: {again}")
        if failure is not None:
            raise failure
        if fetched is None:
            raise AppError(f"no member that has the text of {name} is in the swarm any more: {again}")
        return dict(zip(self._record.texts, fetched, strict=True))

    async def _follow(self, holders: Sequence[str], fetch: trio.CancelScope) -> None:
        """End the fetch once no holder is a member any more."""
        others = [peer for peer in holders if peer != self._place.network.peer_id]
        states, parts = self._place.states, self._record.parts
        while any(map(self._place.is_member, others)) or not states.absent_bytes(parts):  # noqa: ASYNC110
            await trio.sleep(LOOK_S)
        fetch.cancel()

    async def _own(self, words: JoinWords, texts: dict[str, bytes]) -> dict[str, bytes]:
        """Return the files of this node's own text, and what it says of it."""
        from app.rounds.founding import own_texts, source_of

        def made() -> dict[str, bytes]:
            return own_texts(self._record, words.data, texts["tokenizer.json"], texts.get("held"))

        found = await trio.to_thread.run_sync(made)
        return found | {OWN_DATA_FILE: canonical({"source": source_of(words.data), "licence": words.licence})}
