"""The configuration file: reads, edits and migrates one commented TOML file with the settings of `app.config.settings`.

A value comes from the first of: a command's flag, a `SHOAL_…` variable, the file, the default. The file belongs to the
user: changing one setting leaves every other line unchanged, unknown keys are kept and reported, and an older version
is migrated when a node starts, with a backup beside it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from app.config.settings import SETTINGS, Setting, Settings, Value
from app.core.errors import ConfigError, UsageError
from p2p.platform import FileLock, create_private, write_private

VERSION = 1
_MAX_FILE_BYTES = 2**20
_TOP = """\
# Shoal's settings. Remove the leading "# " of a line to change that setting from its default. `shoal config list` shows
# the values in use, and `shoal config set NAME VALUE` edits this file.
"""

Origin = Literal["default", "file", "environment", "flag"]
# Older version -> the function that turns its values into those of the next version.
MIGRATIONS: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}


@dataclass(frozen=True)
class Config:
    """The settings in use, where each value comes from, and the unknown keys of the file."""

    settings: Settings
    origins: Mapping[str, Origin]
    unknown: tuple[str, ...] = ()

    def explicit(self, name: str) -> bool:
        """True if the user chose this value: a chosen port that is in use is an error, a default one is replaced."""
        return self.origins.get(name, "default") != "default"

    def facts(self, name: str) -> dict[str, Any]:
        """Return one setting as the JSON object of the API and of `shoal config --json`."""
        setting = setting_named(name)
        return {
            "name": setting.name,
            "value": getattr(self.settings, setting.name),
            "default": setting.default,
            "origin": self.origins.get(setting.name, "default"),
            "live": setting.live,
            "help": setting.help,
            "expected": setting.expected,
        }

    def with_flags(self, flags: Mapping[str, Value]) -> Config:
        """Return the configuration overridden by a command's flags; a flag of None was not given."""
        given = {name: setting_named(name).check(value) for name, value in flags.items() if value is not None}
        origins: dict[str, Origin] = {**self.origins, **dict.fromkeys(given, "flag")}
        return Config(replace(self.settings, **given), origins, self.unknown)  # type: ignore[arg-type]


def load_config(path: Path, environment: Mapping[str, str]) -> Config:
    """Load the settings from the file, which need not exist, and the environment; raises `ConfigError`."""
    written = _values_in(_text_of(path), path)
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for name, setting in SETTINGS.items():
        if setting.variable in environment:
            values[name], origins[name] = setting.parse(environment[setting.variable]), "environment"
        elif name in written:
            values[name], origins[name] = _checked(setting, written[name], path), "file"
    unknown = tuple(name for name in written if name not in SETTINGS and name != "version")
    return Config(Settings(**values), origins, unknown)


def setting_named(name: str) -> Setting:
    """Find a setting by name; raises `UsageError`, which suggests the most similar name."""
    key = name.strip().lower().replace("-", "_")
    if key in SETTINGS:
        return SETTINGS[key]
    near = difflib.get_close_matches(key, SETTINGS, n=1)
    hint = f"did you mean {near[0]}?" if near else "`shoal config list` shows them all"
    raise UsageError(f"unknown setting {name[:60]!r}: {hint}")


def set_value(path: Path, name: str, text: str) -> Value:
    """Write one setting from its text form and return its new value; raises `ConfigError` or `UsageError`."""
    setting = setting_named(name)
    value = setting.parse(text)
    _edit(path, setting, value)
    return setting.default if value is None else value


def unset(path: Path, name: str) -> None:
    """Reset one setting to its default; raises `ConfigError` or `UsageError`."""
    _edit(path, setting_named(name), None)


def ensure_file(path: Path) -> None:
    """Create the commented file if it is missing, so that the user finds every setting explained."""
    if not path.exists():
        create_private(path, fresh_text({}).encode())


def migrate(path: Path) -> Path | None:
    """Migrate an older file to this version and return the path of its backup; None if it is current."""
    text = _text_of(path)
    values = _parsed(text, path)
    version = _version_of(values, path)
    if version == VERSION:
        return None
    for step in range(version, VERSION):
        values = MIGRATIONS[step](values)
    backup = path.with_name(f"{path.name}.v{version}.bak")
    write_private(backup, text.encode())
    known = {name: _checked(SETTINGS[name], value, path) for name, value in values.items() if name in SETTINGS}
    write_private(path, fresh_text(known).encode())
    return backup


def fresh_text(values: Mapping[str, Value]) -> str:
    """Compose a whole file: every setting explained, those in `values` set, the others commented out."""
    blocks = [_TOP, f"version = {VERSION}\n"]
    for name, setting in SETTINGS.items():
        when = "" if setting.live else " Takes effect at the next start."
        blocks.append(f"# {setting.help}{when}\n{_line(setting, values.get(name))}\n")
    return "\n".join(blocks)


def _edit(path: Path, setting: Setting, value: Value) -> None:
    """Change one setting's line; every other line keeps its place and comments."""
    try:
        with FileLock.acquire(path.with_name(path.name + ".lock"), timeout_s=10.0):
            text = _text_of(path) or fresh_text({})
            _values_in(text, path)
            changed = _with_line(text, setting, value)
            if changed is None:
                raise ConfigError(
                    f"{path} cannot be edited automatically (does {setting.name} span several lines?): edit it by hand"
                )
            write_private(path, changed.encode())
    except TimeoutError as error:
        raise ConfigError(f"{error}; is another `shoal` command hanging?") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def _with_line(text: str, setting: Setting, value: Value) -> str | None:
    """Replace this setting's line, or the commented one if it is not set; None if its value spans several lines."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError
    from tomlkit.items import AoT, Comment, Table

    try:
        document = tomlkit.parse(text.removesuffix("\n") + "\n")
    except (TOMLKitError, RecursionError):  # nested deeper than tomlkit reads, though tomllib does
        return None
    body, line = document.body, _line(setting, value)
    commented = re.compile(rf"#[ \t]*{setting.name}[ \t]*=")
    active = [at for at, (key, _) in enumerate(body) if key is not None and key.key == setting.name]
    inert = [at for at, (_, item) in enumerate(body) if isinstance(item, Comment) and commented.match(item.as_string())]
    tables = [at for at, (_, item) in enumerate(body) if isinstance(item, Table | AoT)]
    if active:
        item = body[active[0]][1]
        if isinstance(item, Table | AoT) or "\n" in item.as_string():
            return None
        line += item.trivia.comment_ws + item.trivia.comment
    replaced = [*active, *inert][:1]
    # A new line goes above the first table, if the user added one: below it, the key would belong to the table.
    at = [*replaced, *tables, len(body)][0]
    body[at : at + len(replaced)] = tomlkit.parse(line + "\n").body
    return document.as_string()


def _line(setting: Setting, value: Value) -> str:
    if value is None:
        default = "" if setting.default is None else _toml(setting, setting.default)
        return f"# {setting.name} = {default}".rstrip()
    return f"{setting.name} = {_toml(setting, value)}"


def _toml(setting: Setting, value: Value) -> str:
    import tomlkit

    if setting.kind == "size" and isinstance(value, int):
        value = _size_text(value)
    return tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()


def _size_text(size: int) -> str:
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def _text_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        text = raw.decode().replace("\r\n", "\n")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text: fix it, or move it away to start with the defaults") from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than 1 MiB: fix it, or move it away to start with the defaults")
    return text


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _version_of(values: Mapping[str, Any], path: Path) -> int:
    version = values.get("version", VERSION)
    if type(version) is not int or not (version == VERSION or version in MIGRATIONS):
        raise ConfigError(f"{path} has version {version!r}, this Shoal reads version {VERSION}; update Shoal")
    return version


def _values_in(text: str, path: Path) -> dict[str, Any]:
    values = _parsed(text, path)
    if _version_of(values, path) != VERSION:
        raise ConfigError(f"{path} has an older version: start a node (`shoal serve`) to migrate it")
    return values


def _checked(setting: Setting, value: object, path: Path) -> Value:
    try:
        return setting.check(value)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
