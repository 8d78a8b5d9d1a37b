"""The reply service: turns a user's request into a reply of the swarm, text in and text out.

It gets tokenizer, embedding and head onto this machine before the first request, and loads them with it, or before it
where a GPU runs the head; the blocks in between run on the hops (`app.asker.asker`).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import trio

from app.asker.asker import USUAL_TOKENS, Asker, AskerOptions
from app.asker.guessing import Guesser, GuessHistory
from app.asker.head_batcher import GoAhead
from app.asker.reply import ReplyAdapter, ReplyDone, ReplyEvent, ReplyText, RouteChanges
from app.asker.stats import AskedSession, AskerStats
from app.core.compute import DraftModel
from app.core.device_thread import DeviceThread
from app.core.engine_import import import_engine
from app.core.errors import AppError, NoAdapter
from app.core.left_behind import left_behind
from app.core.network import FrameStream, Network
from app.core.reasons import Reason
from app.core.span import Span
from app.membership import Membership
from app.planning.replies import PastReply, past_reply, replies_of_members
from app.routing.planner import PrivacyPreferences, RoutePlanner
from app.routing.route import Hop, NoRoute, RouteRequest
from app.routing.trust import TrustBook
from app.swarm.coverage import coverage_of
from app.swarm.records import Announcement
from app.weights.draft_models import AUTO, OFF
from app.weights.extents import WeightsError
from engine.errors import EngineError, SourceError
from engine.text import grammar_trial
from engine.text.output_form import Constraint, ConstraintError, ReplyPart, ToolUse

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from engine.model.block import WeightOptions
    from engine.sources.base import ModelSource
    from engine.swarm_ends import SwarmEnds
    from engine.text.constraint import Grammar
    from engine.text.prompt import PreparedChat
    from engine.text.reply import ReplySettings


log = logging.getLogger("shoal.replies")
T = TypeVar("T")

WAIT_FOR_ENDS_S = 30.0  # for tokenizer, embedding and head to arrive, before a request fails
WAIT_IN_TROUBLE_S = 2.0  # the same where they will hardly come, but may be on this disk
TRY_AGAIN_S = 15.0
TEXT_S = 60.0  # for what a request's text is put through before its reply: template, tokenizer, compiler of grammars
TEXTS_AT_ONCE = 4
FORECAST_TOKENS = 16  # shorter replies say nothing about a forecast


@dataclass(frozen=True)
class ReplyRequest:
    """A conversation, or a text to continue, and the sampling settings of the reply."""

    messages: tuple[Mapping[str, Any], ...] = ()
    prompt: str | tuple[int, ...] | None = None  # a text or its token ids, instead of the messages
    suffix: str | None = None  # the text after the reply, where the reply fills the gap behind the prompt
    max_tokens: int = USUAL_TOKENS
    may_end_sooner: bool = False  # nobody named `max_tokens`: where fewer fit, these will do
    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    private_blocks: int | None = None  # at either end, if more than the setting says
    adapter: str | None = None  # name of an adapter of this home
    swarm: str | None = None  # name or invite of another swarm than the active one
    owner: str = ""  # whose request it is: owners take turns
    constraint: Constraint | None = None  # on the reply's text
    tools: ToolUse | None = None
    is_read: bool = False  # split the reply into text, thoughts and tool calls
    template_variables: Mapping[str, Any] = field(default_factory=dict)  # options of the chat template
    logprobs: int | None = None  # so many likeliest tokens beside each token; None: no probabilities
    logit_bias: tuple[tuple[int, float], ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


@dataclass(frozen=True)
class DraftSource:
    """The setting `draft`, and how to find the draft model that it names, or one by itself."""

    setting: Callable[[], str] = lambda: AUTO
    find: Callable[[ModelSource, str], ModelSource | None] = lambda target, wanted: None


class AdapterOffers(Protocol):
    """The adapters of this home, for hops to fetch; `app.training.reply_adapters` implements it."""

    def offered(self, name: str) -> AbstractAsyncContextManager[ReplyAdapter]:
        """Offer an adapter while the context is open; raises `NoAdapter` if there is none for the swarm's model."""


class NoModelHere(AppError):
    """Tokenizer, embedding or head are not on this machine yet."""

    code = "model_not_here"


class ReplyService:
    """Answers requests over the swarm."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        ends: Callable[[], Awaitable[ModelSource]],
        describe: Callable[[], str],
        own_server: Callable[[FrameStream], Awaitable[None]] | None = None,
        *,
        go_ahead: GoAhead | None = None,
        preferences: Callable[[], PrivacyPreferences] = PrivacyPreferences,
        drafts: DraftSource | None = None,
        book: TrustBook | None = None,
        count: Callable[[int, Sequence[str]], None] = lambda tokens, peers: None,
        keep_sessions: Callable[[], int] = lambda: 0,
        adapters: AdapterOffers | None = None,
        loading: Callable[[], int] = lambda: 0,
        trouble: Callable[[], Reason | None] = lambda: None,
    ) -> None:
        self._trouble = trouble  # that explains a lack of weights or of members better than that lack itself
        self._options = AskerOptions(
            preferences=preferences,
            book=book or TrustBook(),
            keep_sessions=keep_sessions,
            guesser=self._guesser,
            draft=lambda: self._draft,
            loading=loading,
        )
        self._drafts, self._adapters = drafts or DraftSource(), adapters
        self._draft: DraftModel | None = None
        self._draft_label = ""
        self._draft_wanted = OFF  # the setting for which `_draft` was loaded, or is being loaded
        self._members = UsableMembers(membership)
        self._network, self._membership, self._get_ends, self._describe = network, membership, ends, describe
        self._source: ModelSource | None = None
        self._problem = ""
        self._arrived = trio.Event()
        self._own_server, self._go_ahead = own_server, go_ahead
        self._count = count  # called at the end of each reply, with its tokens and the peers that took part
        self.device = DeviceThread()  # that computes head and samples
        self._texts = trio.CapacityLimiter(TEXTS_AT_ONCE)
        self._trials = trio.CapacityLimiter(grammar_trial.AT_ONCE)
        self._trial_turns: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)  # by owner
        self._lock, self._loading = trio.Lock(), trio.Lock()
        self._head_options: WeightOptions | None = None  # None: on the CPU, loaded with the first request
        self._ends: SwarmEnds | None = None
        self._asker: Asker | None = None
        self._nursery: trio.Nursery | None = None

    @property
    def active(self) -> int:
        """Number of replies being written."""
        return 0 if self._asker is None else self._asker.active

    def failing(self) -> frozenset[str]:
        """Return the members at which this node's replies failed again and again."""
        return frozenset() if self._asker is None else self._asker.planner.bans.failing(trio.current_time())

    def stats(self) -> AskerStats:
        """Figures of this node's asker."""
        if self._asker is None:
            return AskerStats()
        return replace(self._asker.stats(), draft_model=self._draft_label if self._draft is not None else "")

    def past_reply(self) -> PastReply:
        """Return what the latest reply showed of its hops."""
        latest = self.stats().latest
        if latest is None:
            return PastReply()
        read = latest.prompt_tokens - latest.cached_tokens
        return past_reply(latest.route, read, latest.prompt_s, latest.return_s)

    def expected_tokens_per_s(self, reply: AskedSession) -> float | None:
        """Return the speed that a forecast gives a reply over its route, with the head as it was measured.

        None if the reply says nothing about forecasts: it was short, its route changed, or a hop is gone meanwhile.
        """
        if self._asker is None or reply.tokens < FORECAST_TOKENS or reply.recoveries or reply.ends_s is None:
            return None
        planner, route = self._asker.planner, tuple(Hop(hop.peer, Span(hop.start, hop.stop)) for hop in reply.route)
        members = [member for member in planner.members() if member.span is not None]
        if not {hop.peer for hop in route} <= {member.peer for member in members}:
            return None
        request = RouteRequest(Span(0, self._membership.n_blocks), reply.prompt_tokens + reply.tokens)
        return replies_of_members(route, members, request, planner.link_s(), reply.ends_s).tokens_per_s

    def unused(self) -> dict[str, Reason]:
        """Members that routes do not use now, each with the reason."""
        options = self._options
        planner = RoutePlanner(self._network, self._members, options.preferences, options.book)
        return (planner if self._asker is None else self._asker.planner).unused(self._membership.n_blocks)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Get the ends, then keep the asker running until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await self._obtain_ends()
            await trio.sleep_forever()

    async def _obtain_ends(self) -> None:
        """Get tokenizer, embedding and head onto the disk; try again until they are there."""
        while self._source is None:
            try:
                self._source = await self._get_ends()
            except WeightsError as error:
                self._problem = str(error)
                await trio.sleep(TRY_AGAIN_S)
        self._arrived.set()
        if self._head_options is not None:
            await self._load_ahead()

    async def place_head(self, options: WeightOptions | None) -> None:
        """Compute the head on this device from now on; None: on the CPU.

        On a GPU it is loaded before the first request; if there is no room for it, it stays on the CPU.
        """
        self._head_options = options
        if self._ends is None:
            if options is not None and self._source is not None:
                await self._load_ahead()
        elif (options or _cpu_ends()).device.type != self._ends.device.split(":")[0]:
            try:
                await self.device.run(self._ends.move, options or _cpu_ends())
            except Exception as error:  # of torch, for one, if the card has failed
                log.warning("the head stays where it is: %s", error)

    async def _load_ahead(self) -> None:
        """Load the ends before the first request; if that fails, requests say so, and hosting goes on."""
        try:
            await self._loaded_ends()
        except Exception as error:  # of torch, for one
            log.warning("tokenizer, embedding and head cannot be loaded: %s", error)

    async def _loaded_ends(self) -> SwarmEnds:
        """Return the ends, loaded if need be."""
        async with self._loading:
            if self._ends is None:
                assert self._source is not None, "ends are loaded once they are on disk"
                options = self._head_options or _cpu_ends()
                try:
                    self._ends = await self.device.run_apart(_load_ends, self._source, options)
                except Exception as error:  # likewise
                    if options.device.type == "cpu":
                        raise
                    log.warning("the head stays on the CPU: %s", error)
                    self._ends = await self.device.run_apart(_load_ends, self._source, _cpu_ends())
            return self._ends

    async def training_ends(self) -> tuple[ModelSource, SwarmEnds]:
        """Return the ends' files and the loaded ends, for a job; raises `NoModelHere` while they are not here."""
        await self._ready()
        assert self._source is not None, "an asker has its ends"
        return self._source, await self._loaded_ends()

    async def reply(self, request: ReplyRequest) -> AsyncGenerator[ReplyEvent, None]:
        """Yield the pieces of a reply, and at last its figures. Raises `AppError` or `EngineError`."""
        ends, asker = await self._ready()
        self._follow_draft_setting()
        prepared = await self._of_text(_prepared, ends, request)
        if request.may_end_sooner:
            prompt = len(prepared.prompt_ids)
            fitting = await asker.fitting_tokens(prompt, request.max_tokens, request.private_blocks)
            request = replace(request, max_tokens=fitting)
        constraint = prepared.constraint
        grammar = None if constraint is None else await self._grammar(ends, constraint, request.owner)
        settings = _settings(ends, request, prepared, grammar)
        reader = prepared.reader if request.is_read else None
        pieces: list[str] = []
        changes = RouteChanges()
        noticed = 0
        peers: dict[str, None] = {}  # that took part, in order
        try:
            async with (
                self._offered(request.adapter) as adapter,
                asker.reply(
                    prepared.prompt_ids,
                    settings,
                    max_tokens=request.max_tokens,
                    private_blocks=request.private_blocks,
                    adapter=adapter,
                    owner=request.owner,
                ) as reply,
            ):
                while (waiting := await reply.waiting()) is not None:
                    yield waiting
                async for piece in reply:
                    pieces.append(piece.text)
                    peers |= dict.fromkeys(hop.peer for hop in reply.stats.route)
                    notice = " ".join(reply.stats.notices[noticed:])
                    noticed = len(reply.stats.notices)
                    parts: tuple[ReplyPart, ...] | None = None
                    if reader is not None:
                        parts = tuple(reader.feed(piece.text, last=piece.finish_reason is not None))
                    route, moved = changes.since(reply.stats)
                    yield ReplyText(piece.text, route, notice, parts, piece.logprob, moved)
                reply.stats.stop_string = reply.stop_string
                if reply.stats.finish_reason == "failed":
                    raise reply.problem
            # Behind the context: a reader that leaves with the last event must not cost the session its rest.
            yield ReplyDone("".join(pieces), reply.stats)
        except NoRoute as error:
            raise self._explained(error) from None
        finally:
            self._count(len(pieces), list(peers))

    def _explained(self, error: NoRoute) -> NoRoute:
        """Return the error of a block that nobody serves with what is wrong at this node, if something is."""
        trouble = self._trouble() if error.is_hole else None
        if trouble is None:
            return error
        return NoRoute(error.block, f": {trouble.text}; {trouble.next_step}", code=trouble.code)

    async def _of_text(self, function: Callable[..., T], *args: Any) -> T:
        """Call what the model's chat template and tokenizer do, in a thread; raises `SourceError` after `TEXT_S`."""
        try:
            return await left_behind(self._texts, TEXT_S, function, *args)
        except trio.TooSlowError:
            raise SourceError(
                f"the model's chat template and tokenizer take more than {TEXT_S:.0f} s for this text: shorten it, or "
                "choose another model"
            ) from None

    async def _grammar(self, ends: SwarmEnds, constraint: Constraint, owner: str) -> Grammar:
        """Return a compiled constraint; of one owner, one is tried at a time. Raises `ConstraintError`."""
        grammars = ends.text.grammars
        is_harmless = grammars.is_harmless(constraint)
        async with nullcontext() if is_harmless else self._trial_turns[owner]:
            try:
                limiter = self._texts if is_harmless else self._trials
                return await left_behind(limiter, TEXT_S, grammars.compile, constraint)
            except trio.TooSlowError:
                raise ConstraintError(constraint.field, grammar_trial.TOO_COMPLEX) from None

    async def tokenize(self, request: ReplyRequest, *, add_special: bool = True) -> list[int]:
        """Return the token ids of a request's prompt; `add_special` is for a text. Raises as `reply` does."""
        ends, _ = await self._ready()
        if isinstance(request.prompt, str) and not add_special:
            return await self._of_text(partial(ends.text.tokenizer.encode, add_special=False), request.prompt)
        return (await self._of_text(_prepared, ends, request)).prompt_ids

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; raises `EngineError` if one is out of range."""
        ends, _ = await self._ready()
        return await self._of_text(ends.prompt_text, token_ids)

    async def embed(self, prompt: str | tuple[int, ...], owner: str = "") -> tuple[list[float], int]:
        """Return the embedding of a text and its number of tokens: the mean of the last block's outputs, of length 1.

        It waits for its owner's turn, as replies do. Raises `AppError` or `EngineError`.
        """
        ends, asker = await self._ready()
        ids = await self._of_text(ends.text_ids, prompt)
        if not ids:
            raise EngineError("the input is empty")
        states = await asker.hidden_states(ids, owner)
        return await self.device.run(ends.mean, states), len(ids)

    @asynccontextmanager
    async def _offered(self, name: str | None) -> AsyncIterator[ReplyAdapter | None]:
        """Offer the adapter of a reply to its hops; raises `NoAdapter`."""
        if name is None:
            yield None
            return
        if self._adapters is None:
            raise NoAdapter(f"no adapter is named {name}: this node has none")
        async with self._adapters.offered(name) as adapter:
            yield adapter

    def _guesser(self, prompt_ids: Sequence[int], history: GuessHistory) -> Guesser | None:
        return None if self._drafts.setting() == OFF else Guesser(prompt_ids, history)

    def _follow_draft_setting(self) -> None:
        """Load the draft model in the background if the setting has changed; replies do not wait for it."""
        wanted = self._drafts.setting()
        if wanted != self._draft_wanted:
            self._draft, self._draft_wanted = None, wanted
            if wanted != OFF and self._nursery is not None:
                self._nursery.start_soon(self._load_draft, wanted)

    async def _load_draft(self, wanted: str) -> None:
        assert self._source is not None, "a draft model is loaded after the ends"
        try:
            found = await self.device.run_apart(self._drafts.find, self._source, wanted)
            if found is None:
                return
            draft = await self.device.run_apart(_load_draft, found, self._source.config.vocab_size)
        except Exception as error:  # a model's files can be wrong in every way; replies go on without guesses of it
            log.warning("there is no draft model: %s", error)
            return
        if self._draft_wanted == wanted:
            log.info("%s guesses tokens for %s", found.label, self._source.label)
            self._draft, self._draft_label = draft, found.label

    async def _ready(self) -> tuple[SwarmEnds, Asker]:
        if self._source is None:  # waited for outside the lock: all who ask have the same time
            with trio.move_on_after(WAIT_FOR_ENDS_S if self._trouble() is None else WAIT_IN_TROUBLE_S):
                await self._arrived.wait()
        if self._source is None:
            what = f"the tokenizer, embedding and head of {self._membership.record} are not on this machine"
            if (trouble := self._trouble()) is not None:
                raise NoModelHere(f"{what}: {trouble.text}; {trouble.next_step}", code=trouble.code)
            how = self._problem or self._describe() or "they are being looked for"
            raise NoModelHere(f"{what} yet: {how}; ask again in a while")
        async with self._lock:
            if self._ends is None or self._asker is None:
                asker = Asker(
                    self._network,
                    await self._loaded_ends(),
                    self.device,
                    self._members,
                    own_server=self._own_server,
                    go_ahead=self._go_ahead,
                    options=self._options,
                )
                assert self._nursery is not None, "replies need a running node"
                # Who asked may have hung up, and a task that a cancelled one starts stays in its scope for ever.
                with trio.CancelScope(shield=True):
                    await self._nursery.start(asker.run)
                self._asker = asker
            assert self._ends is not None, "an asker has its ends"
            return self._ends, self._asker


class UsableMembers:
    """The announcements that routes may use: those of present members and this node and, at need, of suspect members.

    A member is suspect after one failed probe. On a busy machine that happens to healthy members, so they are used if
    the others leave a block without a node that serves it.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._seen: tuple[Sequence[Announcement], Announcement] | None = None
        self._usable: Sequence[Announcement] = ()

    def __call__(self) -> Sequence[Announcement]:
        """Return the announcements; computed again only if a member has changed."""
        membership = self._membership
        present, own = membership.announcements(), membership.own
        if self._seen is None or self._seen[0] is not present or self._seen[1] is not own:
            self._seen, self._usable = (present, own), [*present, own]
            if 0 in coverage_of(self._usable, membership.n_blocks).serving:
                suspects = [member.announcement for member in membership.members() if member.state == "suspect"]
                self._usable = [*self._usable, *suspects]
        return self._usable


def _load_ends(source: ModelSource, options: WeightOptions) -> SwarmEnds:
    import_engine()
    from engine.swarm_ends import load_swarm_ends

    return load_swarm_ends(source, options)


def _load_draft(source: ModelSource, vocabulary: int) -> DraftModel:
    from engine.draft_model import load_draft

    return load_draft(source, _cpu_ends(), vocabulary)


def _cpu_ends() -> WeightOptions:
    from engine.hosting import CPU_ENDS

    return CPU_ENDS


def _prepared(ends: SwarmEnds, request: ReplyRequest) -> PreparedChat:
    from engine.text.infill import infill_prompt
    from engine.text.prompt import PreparedChat
    from engine.text.tool_calls import ReplyReader

    if request.prompt is not None and request.suffix is not None:
        before = request.prompt if isinstance(request.prompt, str) else ends.prompt_text(request.prompt)
        gap = infill_prompt(ends.text.tokenizer, before, request.suffix)
        return PreparedChat(gap.ids, request.constraint, frozenset(), ReplyReader(None), gap.end_ids)
    if request.prompt is not None:
        ids = ends.text_ids(request.prompt)
        return PreparedChat(ids, request.constraint, frozenset(), ReplyReader(None))
    return ends.text.prepare(request.messages, request.tools, request.constraint, request.template_variables)


def _settings(ends: SwarmEnds, request: ReplyRequest, prepared: PreparedChat, grammar: Grammar | None) -> ReplySettings:
    from engine.text.reply import ReplySettings
    from engine.text.sampler import Sampling

    r = request
    ends.check_ids([token for token, _ in r.logit_bias])
    sampling = Sampling(
        r.temperature,
        r.top_k,
        r.top_p,
        r.min_p,
        r.repetition_penalty,
        r.seed,
        r.logit_bias,
        r.frequency_penalty,
        r.presence_penalty,
    )
    shown = prepared.shown if r.is_read else frozenset()
    return ReplySettings(r.max_tokens, sampling, r.stop, grammar, shown, r.logprobs, prepared.end_ids)
