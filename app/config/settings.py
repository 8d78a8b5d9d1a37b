"""All settings as data: name, kind, default, help, and whether a change applies to a running node at once.

Every field of `Settings` is a setting; adding one adds it to the configuration file, the `SHOAL_…` variables and
`shoal config`. `app.config.file` reads and writes the file.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from app.config.timetable import parse_schedule
from app.core.errors import BadValue, UsageError
from app.core.span import Span
from app.core.units import parse_size
from p2p.addresses import PUBLIC_ENTRIES, check_entry, is_peer_id, parse_address
from p2p.errors import P2PError

Kind = Literal[
    "text",
    "ip",
    "integer",
    "flag",
    "size",
    "blocks",
    "timetable",
    "choice",
    "choices",
    "addresses",
    "entries",
    "denials",
    "programs",
    "peers",
    "origins",
    "model",
]
Value = str | int | bool | tuple[str, ...] | None

DISCOVERY = ("mdns", "dht", "invite", "remembered")  # by default; `public` has to be chosen
LISTS = ("choices", "addresses", "entries", "denials", "programs", "peers", "origins")
_MAX_ITEMS = 256
_MAX_CHARS = 512
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class Setting:
    """Declaration of one setting: kind, default, help, bounds, and whether it applies to a running node (`live`)."""

    name: str
    kind: Kind
    default: Value
    help: str
    live: bool
    bounds: tuple[int, int] = (0, 2**62)
    options: tuple[str, ...] = ()
    variable_name: str = ""  # of its variable, after SHOAL_; empty: its own name

    @property
    def variable(self) -> str:
        """Name of the environment variable that overrides it."""
        return f"SHOAL_{(self.variable_name or self.name).upper()}"

    def parse(self, text: str) -> Value:
        """Parse a value from the command line or the environment; raises `BadValue`."""
        text = text.strip()
        if self.kind in LISTS:
            return self.check([item.strip() for item in text.split(",") if item.strip()])
        if self.kind == "flag" and text.lower() in _WORDS:
            return self.check(_WORDS[text.lower()])
        if self.kind == "integer" and text.lstrip("-").isdecimal() and len(text) < 20:
            return self.check(int(text))
        if self.kind in ("size", "blocks") and text.lower() in ("", "none"):
            return None
        return self.check(text)

    def check(self, value: object) -> Value:
        """Validate and normalise a value; raises `BadValue`, which says what is expected."""
        try:
            return self._checked(value)
        except (ValueError, P2PError, UsageError) as error:
            shown = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            raise BadValue(f"the setting {self.name} cannot be {shown[:80]!r}: {error}") from None

    def _checked(self, value: object) -> Value:
        match self.kind, value:
            case ("flag", bool()):
                return value
            case ("integer", int()) if not isinstance(value, bool):
                low, high = self.bounds
                if not low <= value <= high:
                    raise ValueError(f"expected {low} to {high}")
                return value
            case ("size", int()) if not isinstance(value, bool) and value >= 0:
                return value
            case ("size", str()):
                return parse_size(value)
            case ("blocks", str()):
                return str(Span.parse(value))
            case ("text", str()) if value.isprintable() and len(value) <= 32:
                return value
            case ("ip", str()):
                return str(ipaddress.ip_address(value))
            case ("model", str()) if value.isprintable() and 0 < len(value) <= _MAX_CHARS:
                return value
            case ("choice", str()) if value in self.options:
                return value
            case ("timetable", str()):
                parse_schedule(value)
                return " ".join(value.split())
            case (_, list() | tuple()) if self.kind in LISTS and len(value) <= _MAX_ITEMS:
                return tuple(dict.fromkeys(self._item(item) for item in value))
        raise ValueError(f"expected {self.expected}")

    def _item(self, item: object) -> str:
        if not isinstance(item, str) or len(item) > _MAX_CHARS:
            raise ValueError(f"expected {self.expected}")
        if self.kind == "choices" and item not in self.options:
            raise ValueError(f"{item!r} is not one of {', '.join(self.options)}")
        if self.kind == "addresses":
            return str(parse_address(item))
        if self.kind == "entries":
            return check_entry(item)
        if self.kind == "programs":
            return program_name(item)
        if self.kind == "origins":
            return origin_of(item)
        if self.kind == "peers" and not is_peer_id(item):
            raise ValueError(f"{item!r} is not a peer id")
        if self.kind == "denials" and not is_peer_id(item):
            return str(ipaddress.ip_network(item, strict=False))
        return item

    @property
    def expected(self) -> str:
        """The form of a valid value, for error messages and the settings screen."""
        return {
            "text": "printable text of at most 32 characters",
            "ip": "an IP address like 127.0.0.1",
            "model": "the name or folder of a model, as `shoal models` lists it",
            "integer": f"a whole number from {self.bounds[0]} to {self.bounds[1]}",
            "flag": "true or false",
            "size": "a size like 6GB or 500MB",
            "blocks": "a span of blocks like 0:12",
            "choice": f"one of {', '.join(self.options)}",
            "choices": f"some of {', '.join(self.options)}",
            "addresses": "addresses like /ip4/192.0.2.1/tcp/7464",
            "entries": "addresses like /dnsaddr/example.org or /ip4/192.0.2.1/tcp/4001/p2p/PEER",
            "peers": "peer ids, as `shoal peers` shows them",
            "denials": "peer ids and networks like 192.0.2.0/24",
            "origins": "addresses of web pages like http://localhost:3000",
            "programs": "names of programs like blender,steam",
            "timetable": "times of the week like mon-fri 09:00-18:00, sat 22:00-02:00",
        }[self.kind]


def program_name(text: str) -> str:
    """Normalise a program's name for comparison: lower case, without `.exe`; raises `ValueError` if it is empty."""
    name = text.strip().lower().removesuffix(".exe")
    if not name or not name.isprintable():
        raise ValueError("expected a program's name as in the system's process list")
    return name


def origin_of(text: str) -> str:
    """Normalise the origin of web pages; raises `ValueError` if it is not a scheme, a host, and perhaps a port."""
    found = _ORIGIN.fullmatch(text.strip().lower().removesuffix("/"))
    if found is None:
        raise ValueError(f"{text!r} is not of the form http://HOST:PORT or https://HOST")
    return found[0]


def _setting(kind: Kind, default: Value, help: str, *, live: bool = False, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help, "live": live, **more})


_PERCENT: Mapping[str, Any] = {"live": True, "bounds": (0, 100)}
_MINUTES: Mapping[str, Any] = {"live": True, "bounds": (0, 24 * 60)}


@dataclass(frozen=True)
class Settings:
    """Validated values of all settings."""

    name: str = _setting("text", "", "Name of this node in other members' lists.", live=True)
    listen: tuple[str, ...] = _setting(
        "addresses",
        ("/ip4/0.0.0.0/tcp/7464", "/ip6/::/tcp/7464"),
        "Addresses this node listens on; port 0 takes any free port.",
    )
    advertise: tuple[str, ...] = _setting(
        "addresses", (), "Addresses to announce instead of the detected ones; turns mDNS off."
    )
    discovery: tuple[str, ...] = _setting(
        "choices",
        DISCOVERY,
        "Ways to find swarms and members; public adds the public libp2p directory, whose nodes then see this one's "
        "address and the hashes it looks for.",
        options=(*DISCOVERY, "public"),
    )
    public_entries: tuple[str, ...] = _setting(
        "entries", PUBLIC_ENTRIES, "Entry points of the public directory, if discovery includes public."
    )
    public_private: bool = _setting(
        "flag", False, "Use the public directory for private swarms too, if discovery includes public."
    )
    peers: tuple[str, ...] = _setting("addresses", (), "Peers to connect to at start, each ending in /p2p/ and its id.")
    deny: tuple[str, ...] = _setting("denials", (), "Peers and networks that are refused and never dialled.", live=True)
    map_port: bool = _setting(
        "flag", True, "Ask the router to forward the listening port to this node (PCP, NAT-PMP, UPnP)."
    )
    relay: bool = _setting(
        "flag",
        True,
        "Relay limited traffic for nodes behind a NAT if this one is publicly reachable.",
        live=True,
    )
    max_upload: int | None = _setting(
        "size", None, "Most bytes sent per second, LAN exempt; unset: no limit.", live=True
    )
    max_download: int | None = _setting(
        "size", None, "Most bytes received per second, LAN exempt; unset: no limit.", live=True
    )
    limit_times: str = _setting(
        "timetable",
        "",
        "Times when timed_upload and timed_download apply instead, like mon-fri 09:00-18:00.",
        live=True,
    )
    timed_upload: int | None = _setting(
        "size", None, "Most bytes sent per second at those times, LAN exempt; unset: no limit.", live=True
    )
    timed_download: int | None = _setting(
        "size", None, "Most bytes received per second at those times, LAN exempt; unset: no limit.", live=True
    )
    api_host: str = _setting(
        "ip",
        "127.0.0.1",
        "IP address the control API listens on; any but loopback, or 0.0.0.0 for all, adds HTTPS there, on the port "
        "after api_port, for programs with keys.",
    )
    api_origins: tuple[str, ...] = _setting(
        "origins", (), "Web pages that may use the API, with its token, like http://localhost:3000.", live=True
    )
    open_loopback: bool = _setting(
        "flag",
        False,
        "Let programs of this machine ask for replies without a token, as Ollama does; control routes still need it.",
        live=True,
    )
    cache_limit: int | None = _setting(
        "size", None, "Most disk space for weights downloaded from peers; unset: all free space.", live=True
    )
    api_port: int = _setting(
        "integer", 7465, "Port of the control API on this machine; 0 takes any free port.", bounds=(0, 65535)
    )
    device: str = _setting(
        "text",
        "auto",
        "Device to compute on: auto (all GPUs of one kind, as far as the model needs them), cpu, cuda, cuda:1, mps, "
        "xpu, …; several are separated by commas.",
    )
    max_vram: int | None = _setting(
        "size",
        None,
        "Most memory for hosting, KV cache included, and for an island of a training job; 0 hosts nothing; unset: all "
        "free memory.",
        live=True,
    )
    weights: Literal["auto", "own", "int8", "int4"] = _setting(
        "choice",
        "auto",
        "How hosted weights are kept: own (the model's format; on a CPU where it is faster, the 4 to 8 bits of its "
        "files), int8 (half the memory, a little less exact), int4 (a third, less exact, so others "
        "ask this node last; files that have few bits keep their own), or auto: own, and fewer bits on a GPU that "
        "could not host a single block, or not the whole model while alone.",
        options=("auto", "own", "int8", "int4"),
    )
    cache: Literal["own", "int8"] = _setting(
        "choice",
        "own",
        "How hosted blocks keep the keys and values of sessions: own (the format that they are computed in), or int8 "
        "(8 bits: two to four times the tokens in the same memory, a little less exact, and slower on a CPU with long "
        "contexts). Its variable is `SHOAL_KV_CACHE`, because `SHOAL_CACHE` names the folder for weights.",
        options=("own", "int8"),
        variable_name="kv_cache",
    )
    blocks: str | None = _setting("blocks", None, "Host exactly these blocks; unset: the node chooses.")
    private_blocks: int = _setting(
        "integer",
        0,
        "Blocks at either end of the model that run only here or on trusted peers.",
        live=True,
        bounds=(0, 4096),
    )
    trusted: tuple[str, ...] = _setting(
        "peers", (), "Ids of peers that may run private blocks and are never distrusted.", live=True
    )
    train: Literal["never", "trusted", "members"] = _setting(
        "choice",
        "trusted",
        "Whose jobs may train here: nobody's, those of trusted peers, or of all members. Fine-tuning uses the hosted "
        "blocks; islands of several machines have blocks of their own here.",
        live=True,
        options=("never", "trusted", "members"),
    )
    train_memory: int | None = _setting(
        "size", 2**30, "Most memory for jobs, besides the hosted blocks; unset: no limit.", live=True
    )
    train_disk: int | None = _setting(
        "size",
        4 * 2**30,
        "Most disk for the activations of jobs whose members send changes, of this node's own and of others; "
        "unset: no limit.",
        live=True,
    )
    train_jobs: int = _setting("integer", 1, "Most jobs that train here at a time.", live=True, bounds=(1, 64))
    prefer_here: int = _setting(
        "integer",
        20,
        "Use the blocks hosted here if replies get at most this percentage slower; 0: only if fastest, 100: always.",
        **_PERCENT,
    )
    keep_sessions: int = _setting(
        "integer",
        4,
        "Conversations whose cache stays at the hops for 10 minutes, so that the next turn reads only what is new; "
        "others' requests displace it; 0: none.",
        live=True,
        bounds=(0, 64),
    )
    draft: str = _setting(
        "model",
        "auto",
        "Send guesses of the next tokens along, taken from the conversation and a small draft model: auto (a model at "
        "hand with the same tokenizer), the model's name, or off (no guesses).",
        live=True,
    )
    pause_busy: int = _setting(
        "integer",
        0,
        "Pause while other programs use at least this percentage of the device; 0: never.",
        **_PERCENT,
    )
    pause_busy_memory: int | None = _setting(
        "size", None, "Pause while other programs hold at least this much GPU memory; unset: never.", live=True
    )
    pause_active: int = _setting(
        "integer", 0, "Pause if somebody used this machine within this many minutes; 0: never.", **_MINUTES
    )
    pause_on_battery: bool = _setting("flag", True, "Pause while this machine runs on battery.", live=True)
    pause_above: int = _setting(
        "integer", 0, "Pause while the device is hotter than this, in °C; 0: never.", live=True, bounds=(0, 120)
    )
    pause_programs: tuple[str, ...] = _setting(
        "programs", (), "Pause while one of these programs runs, like blender,steam.", live=True
    )
    pause_full_screen: bool = _setting("flag", False, "Pause while a program fills the screen, as games do.", live=True)
    pause_unused: int = _setting(
        "integer",
        0,
        "Unload the blocks after this many minutes without use, until you ask or others need them; 0: never.",
        **_MINUTES,
    )
    pause_times: str = _setting(
        "timetable", "", "Times to pause, in local time, like mon-fri 09:00-18:00, sat 22:00-02:00.", live=True
    )
    disk_floor: int | None = _setting(
        "size",
        10**9,
        "Download no weights, and keep no states of jobs, that would leave less disk space free.",
        live=True,
    )
    log_json: bool = _setting("flag", False, "Write the log as one JSON object per line.")

    @property
    def chosen_device(self) -> str | None:
        """The device that the user named; None: whichever is best."""
        return None if self.device == "auto" else self.device


def _declared(field: dataclasses.Field[Any]) -> Setting:
    more: Mapping[str, Any] = field.metadata
    return Setting(name=field.name, default=cast(Value, field.default), **more)


SETTINGS: Mapping[str, Setting] = {field.name: _declared(field) for field in dataclasses.fields(Settings)}
