"""Reasons: why something is as it is, in one form for states, exclusions and refusals.

A reason is given by the function that decided, carried along, and shown the same everywhere. Its code is stable, for
programs; what a person can do about it goes with the code and stands in one table here. Only the standard library is
needed.
"""

from __future__ import annotations

from dataclasses import dataclass

_ITSELF = "nothing: it is tried again by itself, and other members are used meanwhile"
_OTHERS = "nothing: other members are used until it has room again"
_PARDON = "nothing: the tokens are sent again by themselves"
_HOSTING = "`shoal blocks` shows who serves what"
_MODEL = "see what is wrong with its files with `shoal models verify`"
_REPORT = "look at the node's log; `shoal doctor --bundle FILE` packs it for a bug report"

# For each code, one thing that a person can do; a function that decided may know a better one.
NEXT_STEPS: dict[str, str] = {
    # --- states of a node
    "starting": "wait: it says how far it has come",
    "no_swarm": "`shoal join NAME|INVITE` or `shoal create NAME --model MODEL`",
    "looking": "wait, or ask a member for an invite (`shoal invite`) and join with that",
    "looking_around": "wait a moment: it is about to choose its blocks",
    "leaving": "wait: sessions move to other members, half a minute at most",
    "left": "`shoal serve` starts it again",
    "wrong_secret": "ask a member for a new invite (`shoal invite`)",
    "probe_blocks": "nothing: hosting starts anew by itself; if this comes again, look at the node's log",
    "probe_api": "nothing: the API starts anew by itself; if this comes again, look at the node's log",
    "cannot_host": "`shoal doctor` says what this machine can host",
    "limit_zero": "raise it with `shoal config set max_vram SIZE` and start again to host",
    "no_room": "close other programs, or raise the limit with `shoal config set max_vram SIZE`",
    "asked_for": "start without --blocks to let the node choose by itself",
    "worst_served": _HOSTING,
    "hole": _HOSTING,
    "make_way": _HOSTING,
    "lone_holder": _HOSTING,
    "gain": _HOSTING,
    # --- pauses; a rule names the setting that drops it
    "pause_by_hand": "`shoal resume` hosts again",
    "drained_by_hand": "`shoal resume` hosts again",
    "pause_busy": "`shoal config set pause_busy 0` drops this rule",
    "pause_memory": '`shoal config set pause_busy_memory ""` drops this rule',
    "pause_active": "`shoal config set pause_active 0` drops this rule",
    "pause_battery": "`shoal config set pause_on_battery false` drops this rule",
    "pause_heat": "`shoal config set pause_above 0` drops this rule",
    "pause_program": '`shoal config set pause_programs ""` drops this rule',
    "pause_schedule": '`shoal config set pause_times ""` drops this rule',
    # --- members that no session goes through
    "peer_suspect": "nothing: it is asked again at once, and used again if it answers",
    "peer_dead": "nothing, if it was switched off: its blocks are taken over by others",
    "peer_left": "nothing: its blocks are taken over by others",
    "peer_paused": "wait until its owner resumes it",
    "peer_draining": "nothing: its sessions move to other members",
    "peer_loading": "wait: it serves in a moment",
    "peer_client": "nothing: it asks and does not host",
    "peer_full": "wait until sessions there end, or let more members join",
    "peer_private": "name it with `shoal config set trusted` if you know it, or lower private_blocks",
    "distrusted": "nothing: what was seen of it fades with time; `shoal config set trusted` overrules it",
    # --- what a hop says of itself
    "sessions_full": _OTHERS,
    "asker_sessions_full": "end some of your sessions there, or let other members host these blocks",
    "cache_full": _OTHERS,
    "cache_reserved": _OTHERS,
    "not_hosted": _ITSELF,
    "context_exceeded": "ask for fewer tokens",
    "hop_busy": _OTHERS,
    "hop_refused": _ITSELF,
    "hop_failed": _ITSELF,
    "hop_draining": "nothing: the session moves to another member",
    "hop_gap": _PARDON,
    "hop_link": _PARDON,
    "hop_missing": _PARDON,
    "hop_closed": _PARDON,
    "hop_evicted": "nothing: should a hop fail, the tokens are computed anew",
    # --- what its asker saw of a hop
    "hop_lost": _ITSELF,
    "hop_unopened": _ITSELF,
    "hop_silent": _ITSELF,
    "hop_stuck": _ITSELF,
    "hop_miscut": _ITSELF,
    "hop_forgot": _PARDON,
    "tokens_lost": _PARDON,
    "answer_lost": _PARDON,
    # --- what a request is refused for
    "no_route": "wait for a member to take the block over, or host it: `shoal blocks` shows who serves what",
    "busy": "ask again in a moment, or let more members join",
    "private_blocks": "host them here, name a holder with `shoal config set trusted`, or lower private_blocks",
    "session_lost": "ask again",
    "context_length_exceeded": "shorten the conversation",
    "model_not_here": "wait until it has come from the members: `shoal status` says how far it is",
    "weights_missing": "wait for a member that has them, or bring the model's files here with `shoal pull`",
    "already_member": "leave it first with `shoal leave NAME`, or choose another name",
    "other_secret": "if this invite is the right one, forget the old one first with `shoal leave NAME`",
    "private_swarm": "ask a member for an invite (`shoal invite`)",
    "unknown_swarm": "check the name, or ask a member for an invite (`shoal invite`)",
    "name_conflict": "join one of those that are listed, written as NAME#HASH",
    "bad_usage": "look at `shoal COMMAND --help`",
    "bad_request": "look at /docs, which lists every route and its fields",
    "model_not_found": "use a name that /v1/models lists",
    "unsupported_parameter": "leave it out",
    "bad_record": "get it again from where it came, or update Shoal",
    "bad_config": "`shoal config list` explains every setting",
    "bad_home": "check the home folder's owner and mode, and its disk",
    "not_running": "`shoal serve` starts a node",
    "already_running": "`shoal stop` ends it, or choose another --home",
    "port_in_use": "choose another --api-port, or 0 for any",
    "no_such_address": "`shoal config set api_host 127.0.0.1`",
    "failed": "do what the message says",
    "wrong_token": "use the token in the file `token` of the home folder",
    "foreign_host": "use http://127.0.0.1 or http://localhost, or set api_host",
    "foreign_origin": "open the API from its own address",
    "internal": _REPORT,
    # --- what the network and the engine refuse
    "network": "`shoal doctor` looks at the network",
    "peer_protocol": "update Shoal here or there",
    "peer_refused": _ITSELF,
    "queue_full": "slow down, and try again",
    "stream_closed": _ITSELF,
    "stream_broke": _ITSELF,
    "handshake": "update Shoal here or there",
    "unreachable": "`shoal doctor` looks at the network; it is tried again by itself",
    "deadline": _ITSELF,
    "peer_error": _ITSELF,
    "bad_identity": "check the file and the passphrase",
    "bad_envelope": "set the clock, or update Shoal",
    "engine": _REPORT,
    "bad_source": _MODEL,
    "bad_device": "`shoal doctor` says what this machine can host",
    "bad_step": "ask again",
}


@dataclass(frozen=True)
class Reason:
    """Why something is as it is; see `because`."""

    code: str  # stable, for programs: `pause_battery`, `hole`, `no_room`
    text: str
    peers: tuple[str, ...] = ()  # whom it is about, this node not counted
    next_step: str = ""  # one thing that a person can do about it


def because(code: str, text: str, *peers: str, next_step: str = "") -> Reason:
    """The reason of this code, in these words, about these peers."""
    return Reason(code, text, peers, next_step or NEXT_STEPS[code])
