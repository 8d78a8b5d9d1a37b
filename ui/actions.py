"""Actions of keys and of the command palette: pause, drain, join, create, leave, stop, explain, themes.

Actions that interrupt sessions or cannot be undone ask for confirmation first. The node's answer is shown as a
notification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from textual.app import SystemCommand
from textual.screen import Screen
from textual.theme import Theme
from textual.widget import Widget

from app.api.client import Client
from app.core.errors import AppError
from app.core.terminal_text import one_line
from app.snapshot.views import OfferView, SwarmView
from ui.draw.coverage import loss_words
from ui.draw.first_run_offers import target_words
from ui.draw.node import RULES
from ui.draw.numbers import duration, plural
from ui.draw.state_line import next_step, pill, reason
from ui.draw.theme import THEMES
from ui.node_app import NodeApp
from ui.screens.frame import MainScreen
from ui.state.conversations import FILE, Conversations, ConversationsError

PAUSES = (("half an hour", 1800.0), ("two hours", 7200.0), ("eight hours", 28_800.0))
LETTERS = frozenset(  # actions whose keys are letters and signs, which a screen with an input takes as text
    ("pause", "resume", "drain", "invite", "join", "create", "cap", "why", "zoom", "leave", "switch")
)
_WAITS = {"no_member": "for a member there", "approval_pending": "there until you are let in"}
_IN_SWARM = ("joining", "fetching", "loading", "serving", "client", "paused", "draining")


def allowed(app: NodeApp, action: str) -> bool:
    """True if an action makes sense in the current state; the footer and the palette show only such actions."""
    known = app.store.snapshot
    if action in ("pause", "drain"):
        return known is not None and known.state in _IN_SWARM and not known.courtesy.paused
    if action == "resume":
        return known is not None and known.courtesy.paused
    if action in ("invite", "leave_swarm"):
        return known is not None and known.swarm is not None
    if action == "cap":
        typing = app.focused is not None and app.focused.check_consume_key("plus", "+")
        return known is not None and known.state in _IN_SWARM and known.state != "draining" and not typing
    if action == "go":
        typing = app.focused is not None and app.focused.check_consume_key("1", "1")
        return isinstance(app.screen, MainScreen) and not typing
    if action in ("join", "create"):
        return known is not None and known.swarm is None
    if action == "switch":
        return known is not None and len(known.swarms) > (1 if known.swarm is not None else 0)
    if action in ("why", "stop_node"):
        return known is not None or action == "why"
    if action == "start_node":
        return app.store.link.kind == "away" and app.door is not None and app.door.can_start
    return True


def pause(app: NodeApp, for_s: float | None = None) -> None:
    """Hand sessions over and stop hosting, for `for_s` seconds or until resumed; asks first if that hurts others."""
    period = "" if for_s is None else f" for {duration(for_s)}"

    def sure() -> None:
        app.ask(lambda client: client.post("/control/pause", {"for_s": for_s}), lambda _: app.say(f"paused{period}"))

    warning = loss_words(app.store, "you pause")
    if not warning and (served := _served_sessions(app)):
        warning = f"{plural(served, 'session')} of others will move to other members."
    _when_sure(app, f"Pause hosting{period}?", warning, "Pause", sure)


def _served_sessions(app: NodeApp) -> int:
    known = app.store.snapshot
    if known is None:
        return 0
    return sum(session.role == "serving" and session.asker != known.peer_id for session in known.active_sessions)


def _when_sure(app: NodeApp, words: str, warning: str, yes: str, then: Callable[[], None]) -> None:
    """Continue at once if there is nothing to warn of, else after confirmation."""
    from ui.widgets.dialogs import Question

    if warning:
        app.push_screen(Question(f"{words} {warning}", yes), lambda sure: then() if sure else None)
    else:
        then()


def resume(app: NodeApp) -> None:
    """Host again; says so if a pause rule keeps the node paused, which only its setting or its cause can end."""

    def done(courtesy: dict[str, Any]) -> None:
        rules = courtesy.get("rules", ()) if courtesy.get("paused") else ()
        rule = next((one_line(rule["label"]) for rule in rules if rule["applies"]), "")
        words = f"still paused by a rule: {rule}; the state line says how to turn it off"
        app.say(words if rule else "hosting resumes")

    app.ask(lambda client: client.post("/control/resume", {}), done)


def drain(app: NodeApp) -> None:
    """After confirmation, let running sessions finish, then stop hosting until resumed."""
    from ui.widgets.dialogs import Question

    def answered(sure: bool | None) -> None:
        if sure:
            done = "draining: running sessions finish first"
            app.ask(lambda client: client.post("/control/drain", {}), lambda _: app.say(done))

    known = app.store.snapshot
    running = plural(known.sessions, "session") if known is not None and known.sessions else "no session"
    words = f"Drain: take no new sessions, let the running ones finish ({running}), then host nothing until you resume?"
    app.push_screen(Question(f"{words} {loss_words(app.store, 'you stop')}".strip(), "Drain"), answered)


def join(app: NodeApp) -> None:
    """Ask for a swarm name or an invite, show where it leads, then join that swarm."""
    from ui.widgets.dialogs import Question, TextDialog

    found: list[OfferView] = []

    def answered(target: str | None) -> None:
        if target:
            name, *about = target_words(found[-1]) if found else [one_line(target)[:60]]
            words = [f"Join {name}?", " · ".join(about) + "." * bool(about), leaving_words(app)]
            app.push_screen(Question(" ".join(filter(None, words)), "Join"), lambda sure: go(target) if sure else None)

    def go(target: str) -> None:
        app.say("joining")
        _move(app, target)

    words = "A swarm's name, or an invite. A bare name is found on this network or through a known peer."
    hint = "reading-club, reading-club#1a2b3c4d5e6f70819203 or shoal:…"
    app.push_screen(TextDialog(words, hint=hint, check=app.check("target", found.append)), answered)


def leaving_words(app: NodeApp) -> str:
    """What becomes of the present swarm if this node goes to another; empty if it is in none."""
    known = app.store.snapshot
    if known is None or known.swarm is None:
        return ""
    return f"This node leaves {one_line(known.swarm)}. {loss_words(app.store, 'it leaves')}".strip()


def create(app: NodeApp) -> None:
    """Ask for a model, a name and who may join, then create a swarm."""
    from ui.screens.model_browser import ModelBrowser
    from ui.widgets.dialogs import Choice, TextDialog

    def modelled(model: str | None) -> None:
        if model:
            app.push_screen(
                TextDialog("Name the swarm", value="home", check=app.check("name")),
                lambda name: named(name, model) if name else None,
            )

    def named(name: str, model: str) -> None:
        options = [("public", "whoever knows its name"), ("private", "only those whom you invite")]
        app.push_screen(
            Choice("who may join?", options, "create it"),
            lambda kind: leave(name, model, kind == "private") if kind else None,
        )

    def leave(name: str, model: str, private: bool) -> None:
        _when_sure(app, f"Create {name}?", leaving_words(app), "Create it", lambda: go(name, model, private))

    def go(name: str, model: str, private: bool) -> None:
        app.say(f"creating {name}: the model is read first, which may take a while")
        body = {"name": name, "model": model, "private": private}
        app.ask(lambda client: client.post("/control/create", body, timeout_s=3600.0), lambda it: _joined(app, it))

    app.push_screen(ModelBrowser(), modelled)


def switch(app: NodeApp) -> None:
    """Let the user choose among the saved swarms, and join the chosen one."""
    from ui.widgets.dialogs import Choice

    known = app.store.snapshot
    if known is None:
        return

    def chosen(target: str | None) -> None:
        if target is None or any(swarm.active and swarm.pinned == target for swarm in known.swarms):
            return
        warning = loss_words(app.store, "you leave")
        _when_sure(app, f"Go to {one_line(target)}?", warning, "Go there", lambda: go(target))

    def go(target: str) -> None:
        app.say(f"going to {one_line(target)}")
        _move(app, target)

    def words(swarm: SwarmView) -> str:
        private, here = " · private" if swarm.private else "", " · you are here" if swarm.active else ""
        return f"{one_line(swarm.pinned)}{private}{here}"

    options = [
        (swarm.pinned, words(swarm))
        for swarm in sorted(known.swarms, key=lambda swarm: (swarm.active, -swarm.joined_at_ms))
    ]
    app.push_screen(Choice("switch to which swarm?", options, "go there"), chosen)


def _move(app: NodeApp, target: str, *, force: bool = False) -> None:
    """Join a swarm; if no member answers, or one has to let this node in first, ask whether to move all the same."""
    from ui.widgets.dialogs import Question

    def work(client: Client) -> Any:
        try:
            return client.post("/control/join", {"target": target, "force": force})
        except AppError as error:
            if error.code not in _WAITS or force:
                raise
            return error

    def then(answer: Any) -> None:
        if not isinstance(answer, AppError):
            _joined(app, answer)
            return
        text = one_line(str(answer)).rpartition("; ")[0]  # without what to do on the command line
        app.push_screen(
            Question(f"{text}. Move anyway, and wait {_WAITS[answer.code]}?", "Move anyway"),
            lambda sure: _move(app, target, force=True) if sure else None,
        )

    app.ask(work, then)


def _joined(app: NodeApp, answer: Any) -> None:
    detail = f", {answer['reason']}" if answer.get("reason") else ""
    app.say(f"{answer['swarm']['name']}: {answer['state']}{detail}")


def leave_swarm(app: NodeApp) -> None:
    """After confirmation, leave the active swarm and forget it."""
    from ui.widgets.dialogs import Question

    known = app.store.snapshot
    if known is None or known.swarm is None:
        return
    name = known.swarm

    def answered(sure: bool | None) -> None:
        if sure:
            app.ask(lambda client: client.post("/control/leave", {"name": name}), lambda _: app.say(f"left {name}"))

    words = (
        f"Leave {one_line(name)}? Sessions move to other members; you need an invite to come back to a private swarm."
    )
    app.push_screen(Question(f"{words} {loss_words(app.store, 'you leave')}".strip(), "Leave it"), answered)


def stop_node(app: NodeApp, *, leave: bool = False) -> None:
    """After confirmation, stop the node; `leave` closes the dashboard as well."""
    from ui.widgets.dialogs import Question

    def stopping(_: Any) -> None:
        if leave:
            app.exit()
        else:
            app.say("the node drains, then stops")

    def answered(sure: bool | None) -> None:
        if sure:
            app.ask(lambda client: client.post("/control/stop", {}), stopping)

    rest = "The dashboard closes too." if leave else "The dashboard stays open."
    words = f"Stop the node? Its sessions are handed over first. {rest}"
    app.push_screen(Question(f"{words} {loss_words(app.store, 'it stops')}".strip(), "Stop"), answered)


def why(app: NodeApp) -> None:
    """Show the reason for the node's state, its pause rules, addresses and version."""
    from ui.widgets.dialogs import Facts

    store = app.store
    words, _ = pill(store.link, store.snapshot, store.now())
    facts = [("state", words), ("reason", reason(store.link, store.snapshot))]
    facts += [("you can", store.link.next_step)] if store.link.next_step else []
    known = store.snapshot
    if known is not None:
        if known.why is not None:
            facts += [("who", ", ".join(store.peer_name(peer) for peer in known.why.peers))] if known.why.peers else []
            facts += [("you can", next_step(known.why.code, known.why.next_step))] if known.why.next_step else []
        for warning in known.warnings:
            facts += [("warning", one_line(warning.text)), ("you can", one_line(warning.next_step))]
        for rule in known.courtesy.rules:
            label = RULES.get(rule.code, one_line(rule.label))
            facts.append((f"pause: {label}", _rule(rule.enabled, rule.available, rule.text)))
        facts += [("reach", known.network.reach), ("links", str(known.network.links))]
        router = known.network.mapping or one_line(known.network.mapping_problem)
        facts += [("router", router)] if router else []
        facts += [("address", address) for address in known.listen_addrs[:6]]
        facts += [("node", f"{known.version} · process {known.pid} · {known.api_url}"), ("peer id", known.peer_id)]
    app.push_screen(Facts("why", facts, copied=known.peer_id if known is not None else ""))


def _rule(enabled: bool, available: bool, text: str) -> str:
    if not available:
        return f"not available: {text or 'no such sensor'}"
    return text or ("on" if enabled else "off")


def cap(app: NodeApp, steps: int) -> None:
    """Open the dialog that moves the memory cap, `steps` steps from where it is."""
    from ui.screens.memory_cap import offer_cap

    if app.store.snapshot is not None:
        offer_cap(app, app.store.snapshot, steps)


def _unban(app: NodeApp) -> None:
    from ui.screens.bans import offer_unban

    offer_unban(app)


# --- panels, help and the palette ------------------------------------------------------------------------------------


def panels_of(screen: Screen[Any]) -> list[Widget]:
    """Visible panels that can take the focus, from top left to bottom right."""
    seen = [panel for panel in screen.query(".panel") if panel.display and panel.region.area and panel.focusable]
    return sorted(seen, key=lambda panel: (panel.region.y, panel.region.x))


def help_for(app: NodeApp) -> None:
    """Show help: the focused panel first, then the keys that work now, one of several keys for the same.

    What a screen's keys do to a node is left out where there is none to do it to, as in a recording.
    """
    from ui.widgets.dialogs import Help

    screen = app.screen
    focused = screen.focused
    panel = str(getattr(focused, "HELP", None) or "")
    about = [panel, "" if app.store.marker else str(getattr(screen, "HELP_TEXT", None) or "")]
    title = getattr(focused, "_border_title", None) if panel else None
    keys: dict[str, str] = {}
    for active in screen.active_bindings.values():
        if active.enabled and active.binding.description[:1].islower():  # Textual capitalises its scrolling keys
            keys.setdefault(active.binding.description, app.get_key_display(active.binding))
    rows = [(key, words) for words, key in keys.items()]
    app.push_screen(Help(title.plain if title else "", "\n\n".join(part for part in about if part), rows))


_CHAT = (  # actions of the chat's keys, for the palette
    ("new", "new conversation", "Begin afresh"),
    ("list", "conversations", "Search, open, rename, forget"),
    ("again", "another reply", "Ask the last question again"),
    ("edit", "edit the question", "As a new version; the old one stays"),
    ("branches", "versions", "Go back to another version"),
    ("attach", "attach a text file", "It is sent with the next question"),
    ("copy", "copy the reply", "To the clipboard"),
    ("export", "export", "As a Markdown file"),
    ("sampling", "sampling", "Temperature, system prompt and more"),
)


async def _in_chat(app: NodeApp, action: str) -> None:
    """Go to the chat and do what one of its keys does, if that works now."""
    await app.action_go("chat")
    await app.screen.run_action(action)


async def _edit_setting(app: NodeApp, name: str) -> None:
    """Go to the settings and open the field of one."""
    from ui.screens.settings import SettingsScreen

    await app.action_go("settings")
    if isinstance(app.screen, SettingsScreen):
        app.screen.edit(name)


def commands(app: NodeApp) -> Iterable[SystemCommand]:
    """Entries of the command palette that make sense in the current state."""
    from ui.screens.frame import TABS

    for name in TABS:
        yield SystemCommand(f"Go to {name}", f"The {name} screen", lambda name=name: app.action_go(name))
    able = {
        "pause": ("Pause hosting", "Until you resume", lambda: pause(app)),
        "resume": ("Resume hosting", "Unless a pause rule applies", lambda: resume(app)),
        "drain": ("Drain", "Let sessions finish, then host nothing", lambda: drain(app)),
        "invite": ("Invite", "A line and a QR code for others", app.action_invite),
        "switch": ("Switch to another swarm", "Among those saved", lambda: switch(app)),
        "leave_swarm": ("Leave the swarm", "And forget it", lambda: leave_swarm(app)),
        "stop_node": ("Stop the node", "Drain and stop it; the dashboard stays open", lambda: stop_node(app)),
        "start_node": ("Start the node again", "In this home folder", app.action_start_node),
        "why": ("Why?", "The state with its reason and rules", lambda: why(app)),
    }
    for action, (title, words, run) in able.items():
        if allowed(app, action):
            yield SystemCommand(title, words, run)
    if allowed(app, "pause"):
        for words, for_s in PAUSES:
            yield SystemCommand(f"Pause for {words}", "Then host again", lambda for_s=for_s: pause(app, for_s))
    if app.store.snapshot is not None:
        yield SystemCommand("Join a swarm", "By name or invite", lambda: join(app))
        yield SystemCommand("Create a swarm", "From a model on the node's machine", lambda: create(app))
        yield SystemCommand("Memory cap", "How much memory hosting may take", lambda: cap(app, 0))
        yield SystemCommand("Unban a peer", "Speak again with one that you banned", lambda: _unban(app))
    for action, title, words in _CHAT:
        yield SystemCommand(f"Chat: {title}", words, lambda action=action: _in_chat(app, action))
    for name, words in app.store.settings:
        yield SystemCommand(f"Setting: {name}", words, lambda name=name: _edit_setting(app, name))
    if allowed(app, "stop_node"):
        both = "Stop the node and leave"
        yield SystemCommand(both, "Drain and stop it; the dashboard closes too", lambda: stop_node(app, leave=True))
    for theme in THEMES:
        yield SystemCommand(_theme_title(theme), "Colours", lambda name=theme.name: app.choose_theme(name))
    yield SystemCommand("Leave the dashboard", "The node keeps running", app.action_leave)


# --- themes ----------------------------------------------------------------------------------------------------------


def _theme_title(theme: Theme) -> str:
    return f"Theme: {theme.name.removeprefix('shoal-')}"


def theme_of(option: object) -> str | None:
    """Name of the theme that a palette entry would choose, or None for any other entry."""
    words = str(getattr(getattr(option, "hit", None), "text", None) or "")
    return next((theme.name for theme in THEMES if words.startswith(_theme_title(theme))), None)


def kept_theme(folder: Path | None) -> str:
    """The theme chosen last; the first of `THEMES` if none was or if the file cannot be read."""
    name = None
    if folder is not None and (folder / FILE).exists():
        with suppress(ConversationsError):
            kept = Conversations(folder)
            name = kept.choice("theme")
            kept.close()
    return name if name in {theme.name for theme in THEMES} else THEMES[0].name


def keep_theme(folder: Path | None, name: str) -> None:
    """Remember a theme; if the folder is not writable, the theme is only not remembered."""
    if folder is not None:
        with suppress(ConversationsError):
            kept = Conversations(folder)
            kept.choose("theme", name)
            kept.close()
