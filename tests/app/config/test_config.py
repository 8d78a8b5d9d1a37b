"""The configuration: validated, explained, changed line by line without touching what a person wrote."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.config import file as config
from app.config.file import fresh_text, load_config, set_value, unset
from app.config.settings import SETTINGS, Settings
from app.core.errors import ConfigError, UsageError
from p2p.identity import Identity

PEER = Identity(b"p" * 32).peer_id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def test_without_a_file_the_defaults_hold(path: Path) -> None:
    loaded = load_config(path, {})
    assert loaded.settings == Settings()
    assert not loaded.explicit("api_port")
    assert not path.exists()


def test_every_default_is_a_valid_value() -> None:
    for name, setting in SETTINGS.items():
        if setting.default is not None:
            assert setting.check(setting.default) == setting.default, name
        assert setting.help.endswith((".", "…"))


def test_no_setting_takes_the_name_of_another_variable() -> None:
    assert not {setting.variable for setting in SETTINGS.values()} & {"SHOAL_HOME", "SHOAL_CACHE", "SHOAL_DEBUG"}
    assert SETTINGS["cache"].variable == "SHOAL_KV_CACHE"


def test_a_fresh_file_sets_nothing_and_explains_everything(path: Path) -> None:
    config.ensure_file(path)
    assert tomllib.loads(path.read_text()) == {"version": 1}
    for name, setting in SETTINGS.items():
        assert f"\n# {name} =" in path.read_text()
        assert setting.help in path.read_text()
    path.write_text("api_port = 1\n")
    config.ensure_file(path)
    assert path.read_text() == "api_port = 1\n"


GOOD: list[tuple[str, str, Any]] = [
    ("api_port", "0", 0),
    ("api-port", "65535", 65535),
    ("API_PORT", " 8000 ", 8000),
    ("name", 'my "own" \\ box é 東', 'my "own" \\ box é 東'),
    ("max_vram", "6GB", 6 * 10**9),
    ("max_vram", "1.5GiB", 3 * 2**29),
    ("max_vram", "0", 0),
    ("max_upload", "500kB", 500_000),
    ("discovery", "mdns, invite", ("mdns", "invite")),
    ("discovery", "", ()),
    ("listen", "/ip4/127.0.0.1/tcp/0", ("/ip4/127.0.0.1/tcp/0",)),
    ("peers", f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", (f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}",)),
    (
        "api_origins",
        "http://localhost:3000/, HTTPS://Chat.Example,app://obsidian.md,http://[::1]:8080",
        ("http://localhost:3000", "https://chat.example", "app://obsidian.md", "http://[::1]:8080"),
    ),
    ("deny", f"{PEER},192.0.2.7/24,2001:db8::1", (PEER, "192.0.2.0/24", "2001:db8::1/128")),
    ("relay", "off", False),
    ("relay", "TRUE", True),
    ("blocks", "0:12", "0:12"),
    ("device", "cuda:1", "cuda:1"),
]


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_set_and_read_back(path: Path, name: str, text: str, value: Any) -> None:
    assert set_value(path, name, text) == value
    loaded = load_config(path, {})
    key = name.lower().replace("-", "_")
    assert getattr(loaded.settings, key) == value
    assert loaded.origins == {key: "file"}
    unset(path, name)
    assert load_config(path, {}).settings == Settings()
    # Every other line is as it was.
    assert path.read_text() == fresh_text({})


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("api_port", "65536", "0 to 65535"),
        ("api_port", "-1", "0 to 65535"),
        ("api_port", "http", "whole number"),
        ("api_port", "9" * 30, "whole number"),
        ("max_vram", "lots", "6GB"),
        ("max_vram", "-1GB", "6GB"),
        ("discovery", "carrier-pigeon", "not one of mdns"),
        ("discovery", "mdns,owl", "'mdns,owl': 'owl' is not one of mdns"),
        ("listen", "0.0.0.0:7464", "not of the form"),
        ("deny", "everybody", "everybody"),
        ("api_host", "my.host", "does not appear to be an IPv4 or IPv6 address"),
        ("api_host", "", "IPv4 or IPv6 address"),
        ("api_origins", "*", "is not of the form"),
        ("api_origins", "http://localhost:3000/path", "is not of the form"),
        ("api_origins", "null", "is not of the form"),
        ("relay", "maybe", "true or false"),
        ("blocks", "5", "0:12"),
        ("name", "a\x1bb", "printable"),
        ("name", "x" * 33, "printable"),
    ],
)
def test_what_makes_no_sense_is_refused_and_not_written(path: Path, name: str, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"the setting {name} cannot be .*{reason}"):
        set_value(path, name, text)
    assert not path.exists()


def test_an_unknown_setting_names_the_nearest(path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean api_port"):
        set_value(path, "api_prot", "1")
    with pytest.raises(UsageError, match="config list"):
        set_value(path, "zzz", "1")


def test_flags_win_over_the_environment_over_the_file(path: Path) -> None:
    set_value(path, "api_port", "1")
    set_value(path, "device", "cpu")
    loaded = load_config(path, {"SHOAL_API_PORT": "2", "SHOAL_RELAY": "no", "SHOAL_OTHER": "x"})
    assert (loaded.settings.api_port, loaded.settings.device, loaded.settings.relay) == (2, "cpu", False)
    assert loaded.origins == {"api_port": "environment", "device": "file", "relay": "environment"}
    flagged = loaded.with_flags({"api_port": 3, "device": None, "max_vram": "6GB", "listen": ("/ip4/0.0.0.0/tcp/0",)})
    assert (flagged.settings.api_port, flagged.settings.device, flagged.settings.max_vram) == (3, "cpu", 6 * 10**9)
    assert flagged.explicit("api_port")
    assert flagged.explicit("listen")
    assert not flagged.explicit("name")
    with pytest.raises(ConfigError, match="max_vram"):
        loaded.with_flags({"max_vram": "much"})
    with pytest.raises(ConfigError, match="the setting api_port"):
        load_config(path, {"SHOAL_API_PORT": "x"})


HAND_WRITTEN = """\
# my own words
api_port = 7000   # because 7465 is taken
devcie = "cpu"

[notes]
api_port = "not the setting"
"""


def test_a_hand_written_file_keeps_its_words(path: Path) -> None:
    path.write_text(HAND_WRITTEN)
    set_value(path, "name", "box")
    set_value(path, "api_port", "7001")
    expected = HAND_WRITTEN.replace("api_port = 7000 ", "api_port = 7001 ")
    assert path.read_text() == expected.replace("\n[notes]", '\nname = "box"\n[notes]')
    loaded = load_config(path, {})
    assert (loaded.settings.name, loaded.settings.api_port) == ("box", 7001)
    assert loaded.unknown == ("devcie", "notes")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('[notes]\n# name = "x"\n', 'name = "box"\n[notes]\n# name = "x"\n'),
        ('note = """\nname = "x"\n"""', 'note = """\nname = "x"\n"""\nname = "box"\n'),
        ('"name" = "x" # mine\n[[list]]\nname = 1\n', 'name = "box" # mine\n[[list]]\nname = 1\n'),
        ('# name = "x"\nname = "y"\n', '# name = "x"\nname = "box"\n'),
    ],
)
def test_only_the_setting_itself_is_changed(path: Path, before: str, after: str) -> None:
    path.write_text(before)
    set_value(path, "name", "box")
    assert path.read_text() == after
    assert load_config(path, {}).settings.name == "box"


@pytest.mark.parametrize("text", ["[name]\n", "name.first = 1\n", f"k = {'[' * 150}{']' * 150}\n"])
def test_a_file_that_cannot_be_edited_stays_as_it_is(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match="edit it by hand"):
        set_value(path, "name", "box")
    assert path.read_text() == text


def test_what_cannot_be_changed_line_by_line_is_left_alone(path: Path) -> None:
    text = 'deny = [\n  "192.0.2.0/24",\n]\n'
    path.write_text(text)
    assert load_config(path, {}).settings.deny == ("192.0.2.0/24",)
    with pytest.raises(ConfigError, match="edit it by hand"):
        set_value(path, "deny", "")
    assert path.read_text() == text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.text(max_size=200)
    | st.sampled_from(sorted(SETTINGS)).flatmap(lambda n: st.text(max_size=20).map(f"{n} = ".__add__))
)
def test_any_text_is_a_configuration_or_a_config_error(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        loaded = load_config(path, {})
    except ConfigError:
        return
    assert set(loaded.origins.values()) <= {"file"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(st.lists(st.sampled_from(GOOD), max_size=6))
def test_any_run_of_changes_says_what_was_said_last(path: Path, changes: list[tuple[str, str, Any]]) -> None:
    path.unlink(missing_ok=True)
    expected = Settings()
    for name, text, value in changes:
        set_value(path, name, text)
        expected = dataclasses.replace(expected, **{name.lower().replace("-", "_"): value})
    assert load_config(path, {}).settings == expected


@pytest.mark.parametrize("text", ["version = 2", "version = 0", 'version = "1"', "version = true"])
def test_another_version_is_refused_by_name(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match="this Shoal reads version 1"):
        load_config(path, {})


def test_an_older_file_is_migrated_and_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "MIGRATIONS", {0: lambda old: {"api_port": old["port"]}})
    old = "version = 0\nport = 9000 # mine\n"
    path.write_text(old)
    with pytest.raises(ConfigError, match="older version"):
        load_config(path, {})
    backup = config.migrate(path)
    assert backup is not None
    assert backup.read_text() == old
    assert load_config(path, {}).settings.api_port == 9000
    assert config.migrate(path) is None


def test_unreadable_files_say_so(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (2**20 + 1))
    for path, reason in ((tmp_path, "cannot be read"), (binary, "not UTF-8"), (large, "more than 1 MiB")):
        with pytest.raises(ConfigError, match=reason):
            load_config(path, {})
