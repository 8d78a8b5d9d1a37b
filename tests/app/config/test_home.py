"""The home folder: one token, one node at a time, stale files that mean nothing, and swarms that are not forgotten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api.client import WrongToken, client_of, running_client
from app.config import home as homes
from app.config.file import ensure_file
from app.config.home import HOME_FILES, Home, NodeInfo, find_node, hold, remove_node_file, require_node, write_node_file
from app.core.errors import AlreadyRunning, HomeError, NotRunning
from app.swarm.invite import Invite
from app.swarm.names import SwarmName
from app.swarm.records import read_record, sign_record
from app.swarm.saved import MAX_SWARMS, SavedSwarm, SavedSwarms, load, update
from p2p.identity import Identity, load_or_create
from p2p.platform import FileLock, is_private

NOW = 1_800_000_000_000
MODEL, OTHER = "1a2b3c4d" * 8, "ffee0011" * 8
NODE = NodeInfo(os.getpid(), "http://127.0.0.1:7465", Identity(b"n" * 32).peer_id, ("/ip4/127.0.0.1/tcp/7464",))

HOLDER = """
import sys
from pathlib import Path
from app.config import home as homes
home = homes.Home(Path(sys.argv[1]))
lock = homes.hold(home)
homes.write_node_file(home, homes.NodeInfo(4242, "http://127.0.0.1:1", "12D3", ()))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home")


def test_the_home_is_private_and_chosen_by_flag_or_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "by-variable"))
    assert Home.open().folder == tmp_path / "by-variable"
    assert Home.open(tmp_path / "by-flag").folder == tmp_path / "by-flag"
    assert is_private(tmp_path / "by-flag")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(HomeError, match="cannot be created"):
        Home.open(tmp_path / "file" / "home")


def test_the_table_of_files_names_each_path_once_and_explains_it(home: Home) -> None:
    assert len({entry.name for entry in HOME_FILES}) == len(HOME_FILES)
    assert all(entry.holds for entry in HOME_FILES)
    assert Home.token_file in HOME_FILES
    assert home.token_file == home.folder / Home.token_file.name


def test_files_are_as_private_as_the_table_says(home: Home) -> None:
    homes.api_token(home)
    homes.write_sequence(home, 1)
    write_node_file(home, NODE)
    update(home, lambda known: known.joined(SavedSwarm("reef", MODEL, NOW)))
    ensure_file(home.config_file)
    load_or_create(home.key_file)
    written = [entry for entry in HOME_FILES if (home.folder / entry.name).exists()]
    assert len(written) == 6
    assert all(entry.private and is_private(home.folder / entry.name) for entry in written)


def test_the_token_is_private_and_stays(home: Home) -> None:
    token = homes.api_token(home)
    assert len(token) >= 43
    assert homes.api_token(home) == token
    assert is_private(home.token_file)


def test_a_command_makes_no_token_that_the_running_node_does_not_know(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    with hold(home):
        write_node_file(home, NODE)
        for client in (client_of, running_client):
            with pytest.raises(WrongToken, match=r"token is gone.*`shoal restart` makes a new one"):
                client(home.folder)
        assert not home.token_file.exists()
        token = homes.api_token(home)
        assert client_of(home.folder).token == token
        remove_node_file(home)


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 40, b"a\nb" * 20])
def test_a_damaged_token_is_refused(home: Home, content: bytes) -> None:
    home.token_file.write_bytes(content)
    with pytest.raises(HomeError, match="delete the file"):
        homes.api_token(home)


def test_a_node_is_found_while_it_holds_its_home(home: Home) -> None:
    with pytest.raises(NotRunning, match="start one with `shoal serve`"):
        require_node(home)
    lock = hold(home)
    with pytest.raises(NotRunning, match="starting or stopping"):
        require_node(home)
    write_node_file(home, NODE)
    assert require_node(home) == NODE
    assert json.loads(home.node_file.read_bytes()) == {
        "pid": os.getpid(),
        "api_url": NODE.api_url,
        "peer_id": NODE.peer_id,
        "listen_addrs": ["/ip4/127.0.0.1/tcp/7464"],
    }
    homes.remove_node_file(home)
    assert find_node(home) is None
    lock.release()


def test_a_killed_nodes_file_is_stale_at_once(home: Home) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(home.folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        found = find_node(home)
        assert found is not None
        assert found.pid == 4242
        with pytest.raises(AlreadyRunning, match=r"process 4242, http://127\.0\.0\.1:1\): stop it with `shoal stop`"):
            hold(home)
    finally:
        process.kill()
        process.communicate()
    assert home.node_file.exists()
    assert find_node(home) is None
    with hold(home):
        assert not home.node_file.exists()  # a starter is not found before it says so itself


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"pid": "1"}', b"\xff", b"{" * 5000])
def test_a_damaged_node_file_is_no_node(home: Home, content: bytes) -> None:
    with hold(home):
        home.node_file.write_bytes(content)
        assert find_node(home) is None


def test_the_sequence_is_kept_and_a_damaged_one_forgotten(home: Home) -> None:
    assert homes.read_sequence(home) == 0
    homes.write_sequence(home, NOW)
    assert homes.read_sequence(home) == NOW
    for content in (b"", b"x", b"-5", b"9" * 30, b"\xff", "²".encode()):
        home.sequence_file.write_bytes(content)
        assert homes.read_sequence(home) == 0


def test_importing_stays_light() -> None:
    code = (
        "import sys, app.config.home, app.swarm.saved, app.config.file, app.manifest.manifest, "
        "app.manifest.importing, app.swarm.rendezvous, "
        "app.swarm.name_resolution, app.swarm.invite\n"
        "print(sorted({'torch', 'trio', 'libp2p', 'textual', 'segno', 'psutil', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- remembered swarms -----------------------------------------------------------------------------------------------


def swarm(name: str = "attic", model: str = MODEL, secret: bytes | None = None) -> SavedSwarm:
    return SavedSwarm(name, model, NOW, secret)


def test_swarms_are_remembered_with_their_secrets_in_a_private_file(home: Home) -> None:
    assert load(home) == SavedSwarms()
    record = sign_record(Identity(b"a" * 32), "attic", MODEL, now_ms=NOW, private=True)
    private = SavedSwarm.from_record(record, now_ms=NOW, secret=b"s" * 32)
    invited = SavedSwarm.from_invite(Invite("cellar", OTHER, ("/ip4/1.2.3.4/tcp/1/p2p/x",)), now_ms=NOW)
    update(home, lambda known: known.joined(invited).joined(private))
    known = load(home)
    assert known.swarms == (invited, private)
    assert known.active == private
    assert private.record is not None
    assert read_record(private.record, now_ms=NOW) == record
    assert is_private(home.swarms_file)
    assert "ssss" not in repr(known)


def test_joining_again_switches_and_keeps_what_is_known() -> None:
    known = SavedSwarms().joined(swarm(secret=b"s" * 32)).joined(swarm("cellar"))
    assert known.active == swarm("cellar")
    again = known.joined(swarm())
    assert again.active == swarm(secret=b"s" * 32)
    assert len(again.swarms) == 2
    assert again.joined(swarm(secret=b"t" * 32)).active == swarm(secret=b"t" * 32)


def test_leaving_forgets_one_swarm_alone() -> None:
    known = SavedSwarms().joined(swarm()).joined(swarm("cellar"))
    assert known.left(swarm().id).active == swarm("cellar")
    assert known.left(swarm("cellar").id) == SavedSwarms((swarm(),), None)
    assert known.left("nothing") == known


def test_names_and_pins_find_what_is_remembered() -> None:
    known = SavedSwarms().joined(swarm()).joined(swarm(model=OTHER)).joined(swarm("cellar"))
    assert known.matching(SwarmName("attic")) == (swarm(), swarm(model=OTHER))
    assert known.matching(SwarmName("attic", OTHER[:20])) == (swarm(model=OTHER),)
    assert known.matching(SwarmName("roof")) == ()


def test_the_number_of_swarms_is_bounded() -> None:
    full = SavedSwarms(tuple(swarm(f"s{number}") for number in range(MAX_SWARMS)))
    assert full.joined(swarm("s7")).active == swarm("s7")
    with pytest.raises(HomeError, match="leave one"):
        full.joined(swarm())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"version": 2, "swarms": []}',
        b'{"version": 1}',
        b'{"version": 1, "swarms": [5]}',
        b'{"version": 1, "swarms": [{"name": "../x", "model": "00"}]}',
    ],
)
def test_a_damaged_file_is_an_error_and_never_overwritten(home: Home, content: bytes) -> None:
    home.swarms_file.write_bytes(content)
    with pytest.raises(HomeError, match=r"swarms\.json.*restore it from a backup"):
        update(home, lambda known: known.joined(swarm()))
    assert home.swarms_file.read_bytes() == content


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.binary(max_size=100), st.sampled_from(["name", "model", "secret", "record", "addresses", "joined_at_ms"]))
def test_any_value_in_any_field_is_read_or_an_error(home: Home, value: bytes, name: str) -> None:
    home.swarms_file.unlink(missing_ok=True)
    update(home, lambda known: known.joined(swarm(secret=b"s" * 32)))
    document = json.loads(home.swarms_file.read_bytes())
    values: list[object] = [value.decode("latin-1"), None, [value.hex()], len(value), {}]
    for strange in values:
        document["swarms"][0][name] = strange
        home.swarms_file.write_text(json.dumps(document))
        try:
            assert len(load(home).swarms) == 1
        except HomeError:
            continue


ADDER = """
import sys
from pathlib import Path
from app.config.home import Home
from app.swarm.saved import SavedSwarm, update
for number in range(10):
    update(Home(Path(sys.argv[1])), lambda known: known.joined(SavedSwarm(f"{sys.argv[2]}{number}", "00" * 32, 0)))
"""


def test_processes_that_join_at_once_lose_nothing(home: Home) -> None:
    adders = [subprocess.Popen([sys.executable, "-c", ADDER, str(home.folder), name]) for name in ("a", "b", "c")]
    assert [adder.wait(timeout=60) for adder in adders] == [0, 0, 0]
    assert {known.name for known in load(home).swarms} == {f"{name}{number}" for name in "abc" for number in range(10)}


def test_a_hanging_writer_is_an_error_and_not_a_hang(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(path: Path, *, timeout_s: float) -> None:
        raise TimeoutError(f"{path} is locked by another process")

    monkeypatch.setattr(FileLock, "acquire", busy)
    with pytest.raises(HomeError, match="hanging"):
        update(home, lambda known: known)
