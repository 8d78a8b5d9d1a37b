"""Reasons shown to the user for states, exclusions and refusals: a stable code, a text, and a next step.

The function that decides makes the reason; the command line, the API and the dashboard show it unchanged. `NEXT_STEPS`
is the one table of codes, with what the user can do about each. Imports nothing but the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

_RETRIED_AUTOMATICALLY = "nothing: Shoal retries by itself and uses other members meanwhile"
_OTHERS_USED = "nothing: other members are used until it has room again"
_RESENT_AUTOMATICALLY = "nothing: Shoal sends the tokens again by itself"
_HOSTING = "`shoal blocks` shows who serves what"
_MODEL = "`shoal models verify` shows what is wrong with its files"
_REPORT = "look at the node's log; `shoal doctor --bundle FILE` packs it for a bug report"

# Code -> one thing that the user can do; `because` accepts a more specific one.
NEXT_STEPS: dict[str, str] = {
    # --- states of a node
    "starting": "wait: `shoal status` shows the progress",
    "no_swarm": "`shoal join NAME|INVITE` or `shoal create NAME --model MODEL`",
    "looking": "wait, or ask a member for an invite (`shoal invite`) and join with it",
    "looking_around": "wait a moment: the node is about to choose its blocks",
    "leaving": "wait: sessions move to other members, which takes at most half a minute",
    "left": "`shoal serve` starts it again",
    "clock_off": "set the clock, best by turning on the system's time service",
    "twin": "stop one of the two; in a copied home, move identity.key away first: the node makes a new one",
    "wrong_secret": "ask a member for a new invite (`shoal invite`)",
    "probe_blocks": "nothing: hosting restarts by itself; if this happens again, look at the node's log",
    "probe_api": "nothing: the API restarts by itself; if this happens again, look at the node's log",
    "cannot_host": "`shoal doctor` says what this machine can host",
    "disk_full": "make room as the message says, or set SHOAL_CACHE to a folder on another disk; it is tried again",
    "disk_back": _HOSTING,
    "weights_unstored": "see to the disk as the message says; it is tried again every ten minutes",
    "limit_zero": "to host, raise the limit: + in the dashboard, or `shoal config set max_vram SIZE`",
    "limit_changed": "wait: sessions move to other members, then hosting restarts",
    "memory_short": "nothing: the blocks come back once other programs have left the memory free for a while",
    "memory_back": _HOSTING,
    "no_room": "close other programs: hosting begins by itself once there is room",
    "asked_for": "start without --blocks to let the node choose by itself",
    "worst_served": _HOSTING,
    "growing": "nothing: the other blocks follow by themselves",
    "hole": _HOSTING,
    "make_way": _HOSTING,
    "lone_holder": _HOSTING,
    "gain": _HOSTING,
    # --- pauses; each rule is turned off by its setting
    "pause_by_hand": "`shoal resume` hosts again",
    "drained_by_hand": "`shoal resume` hosts again",
    "pause_busy": "`shoal config set pause_busy 0` turns this rule off",
    "pause_memory": '`shoal config set pause_busy_memory ""` turns this rule off',
    "pause_active": "`shoal config set pause_active 0` turns this rule off",
    "pause_battery": "`shoal config set pause_on_battery false` turns this rule off",
    "pause_heat": "`shoal config set pause_above 0` turns this rule off",
    "pause_program": '`shoal config set pause_programs ""` turns this rule off',
    "pause_full_screen": "`shoal config set pause_full_screen false` turns this rule off",
    "pause_unused": "ask something and they are loaded again; `shoal config set pause_unused 0` turns this rule off",
    "pause_schedule": '`shoal config set pause_times ""` turns this rule off',
    # --- members that sessions are not routed through
    "peer_suspect": "nothing: it is probed again at once, and used again if it answers",
    "peer_dead": "nothing, if it was switched off: other members take its blocks over",
    "peer_left": "nothing: other members take its blocks over",
    "peer_paused": "wait until its owner resumes it",
    "peer_draining": "nothing: its sessions move to other members",
    "peer_loading": "wait: it will serve in a moment",
    "peer_client": "nothing: it only asks and does not host",
    "peer_full": "wait until sessions there end, or let more members join",
    "peer_private": "if you know it, add it with `shoal config set trusted`; or lower private_blocks",
    "peer_clock": "tell its owner to set its clock, best by turning on the system's time service",
    "distrusted": "nothing: past failures count less with time; `shoal config set trusted` overrides this",
    # --- reported by a hop about itself
    "sessions_full": _OTHERS_USED,
    "asker_sessions_full": "end some of your sessions there, or let other members host these blocks",
    "cache_full": _OTHERS_USED,
    "cache_reserved": _OTHERS_USED,
    "not_hosted": _RETRIED_AUTOMATICALLY,
    "context_exceeded": "ask for fewer tokens",
    "cache_exceeded": "lower max_tokens (num_predict in Ollama's API), shorten the conversation, or let members with "
    "more memory join",
    "adapter_refused": "nothing: other members are used; if none can load it, train one of a lower rank",
    "adapters_full": _OTHERS_USED,
    "hop_busy": _OTHERS_USED,
    "hop_refused": _RETRIED_AUTOMATICALLY,
    "hop_failed": _RETRIED_AUTOMATICALLY,
    "hop_draining": "nothing: the session moves to another member",
    "hop_gap": _RESENT_AUTOMATICALLY,
    "hop_input": _RESENT_AUTOMATICALLY,
    "hop_link": _RESENT_AUTOMATICALLY,
    "hop_missing": _RESENT_AUTOMATICALLY,
    "hop_closed": _RESENT_AUTOMATICALLY,
    "hop_evicted": "nothing: if a hop fails, its tokens are computed again",
    # --- observed by the asker about a hop
    "hop_lost": _RETRIED_AUTOMATICALLY,
    "hop_unopened": _RETRIED_AUTOMATICALLY,
    "hop_silent": _RETRIED_AUTOMATICALLY,
    "hop_stuck": _RETRIED_AUTOMATICALLY,
    "hop_miscut": _RETRIED_AUTOMATICALLY,
    "hop_forgot": _RESENT_AUTOMATICALLY,
    "hop_without_adapters": "wait until its owner updates Shoal; other members are used meanwhile",
    "tokens_lost": _RESENT_AUTOMATICALLY,
    "answer_lost": _RESENT_AUTOMATICALLY,
    # --- refused requests
    "no_route": "wait until a member hosts the block, or host it here: `shoal blocks` shows who serves what",
    "busy": "ask again in a moment, or let more members join",
    "private_blocks": "host them here, add one of their hosts with `shoal config set trusted`, or lower private_blocks",
    "session_lost": "ask again",
    "context_length_exceeded": "shorten the conversation",
    "adapter_not_found": "`shoal adapters` lists those of this home and their models",
    "no_adapter_route": "wait until members that can load the adapter serve the block, or ask without --adapter",
    "model_not_here": "wait until it is downloaded from the members: `shoal status` shows the progress",
    "model_gone": "put it back, or wait for a member that has the weights: either way it goes on by itself",
    "weights_wanted": "wait for a member that gives them: it goes on by itself",
    "weights_missing": "wait for a member that has them, or download the model with `shoal pull`",
    "already_member": "leave it first with `shoal leave NAME`, or choose another name",
    "other_secret": "if this invite is the right one, leave the old swarm first with `shoal leave NAME`",
    "private_swarm": "ask a member for an invite (`shoal invite`)",
    "no_member": "ask a member for a new invite, or try again later; `shoal join --force` moves anyway",
    "approval_pending": "wait, or tell the member that made the invite: `shoal invites` there lists who asks",
    "invite_unknown": "ask for a new invite (`shoal invite`)",
    "invite_expired": "ask for a new invite (`shoal invite`)",
    "invite_used": "ask for a new invite; if nobody you know used it, tell the member that made it",
    "invite_refused": "ask the member that made the invite",
    "invite_crowded": "tell the member that made the invite: `shoal invites` there lists who asks",
    "may_not_invite": "ask the swarm's creator for an invite made with `shoal invite --delegate`",
    "revoked": "ask the swarm's creator; `shoal leave NAME` forgets the swarm",
    "unknown_swarm": "check the name, or ask a member for an invite (`shoal invite`)",
    "name_conflict": "join one of those listed, as NAME#HASH",
    "bad_usage": "see `shoal COMMAND --help`",
    "not_found": "see /docs, which lists every route",
    "bad_request": "see /docs, which lists every route and its fields",
    "model_not_found": "use one of the names in /v1/models",
    "unsupported_parameter": "leave it out",
    "bad_record": "get it again from its source, or update Shoal",
    "bad_config": "`shoal config list` explains every setting",
    "bad_value": "`shoal config list` explains every setting",
    "bad_home": "check the owner and mode of the home folder, and its disk",
    "not_running": "`shoal serve` starts a node",
    "not_answering": "`shoal logs` shows the log; if its process hangs, end it, then `shoal serve` starts a node",
    "already_running": "`shoal stop` stops it; or choose another --home",
    "port_in_use": "choose another --api-port, or 0 for any",
    "no_such_address": "`shoal config set api_host 127.0.0.1`",
    "no_keys": "`shoal keys add NAME` makes a key; `shoal config unset api_host` keeps the API on this machine",
    "failed": "do what the message says",
    "wrong_token": "use the token from the file `token` in the home folder; if it is gone, `shoal restart` makes one",
    "key_not_allowed": "use the token from the file `token` in the home folder",
    "rate_limited": "wait as long as the header retry-after says; `shoal keys` shows the limits",
    "foreign_host": "use http://127.0.0.1 or http://localhost, or set api_host",
    "foreign_origin": "to allow a site, add it with `shoal config set api_origins`",
    "internal": _REPORT,
    # --- errors of the network and the engine
    "network": "`shoal doctor` checks the network",
    "peer_protocol": "update Shoal on this node or on the peer",
    "peer_refused": _RETRIED_AUTOMATICALLY,
    "queue_full": "send more slowly, and try again",
    "stream_closed": _RETRIED_AUTOMATICALLY,
    "stream_broke": _RETRIED_AUTOMATICALLY,
    "handshake": "update Shoal on this node or on the peer",
    "unreachable": "nothing: Shoal retries by itself; `shoal doctor` checks the network",
    "deadline": _RETRIED_AUTOMATICALLY,
    "peer_error": _RETRIED_AUTOMATICALLY,
    "bad_identity": "check the file and the passphrase",
    "bad_envelope": "check this machine's clock, or update Shoal",
    "engine": _REPORT,
    "bad_source": _MODEL,
    "bad_device": "`shoal doctor` says what this machine can host",
    "device_full": "close other programs, or lower the limit with `shoal config set max_vram SIZE`",
    "bad_step": "ask again",
    "bad_training": "`shoal finetune --dry-run` says what would be trained",
    "training_full": "nothing: the micro-batch is sent again when there is room",
    "training_stopped": "the job stays at its last snapshot: remove the cause, then go on with `shoal jobs resume`",
    "bad_data": "correct the file, then run it again",
}


@dataclass(frozen=True)
class Reason:
    """A code, the text shown to the user, and what to do; create it with `because`."""

    code: str  # stable, for programs; a key of `NEXT_STEPS`, like `pause_battery`
    text: str
    peers: tuple[str, ...] = ()  # peers concerned, never this node
    next_step: str = ""  # one thing that the user can do about it


def because(code: str, text: str, *peers: str, next_step: str = "") -> Reason:
    """Build a reason; the next step is that of `NEXT_STEPS` unless given. An unknown code raises `KeyError`."""
    return Reason(code, text, peers, next_step or NEXT_STEPS[code])
