"""Files of machines and links: what is read, and what is refused in one line that names the machine and the field."""

from __future__ import annotations

import pytest

from app.planning.machines import Fleet, PlanError, read_machines, with_links

DESK = """
[[machine]]
name = "desk"
memory_bytes = "24GB"
reading_bytes_per_s = "900GB"
flops_per_s = 71e12
"""
TWO = DESK + DESK.replace("desk", "attic") + "rtt_s = 0.02\ncount = 1\n"


def two() -> Fleet:
    return read_machines(TWO, "two.toml")


def test_a_file_of_machines() -> None:
    fleet = read_machines(DESK + DESK.replace("desk", "rack") + 'count = 3\nkind = "cpu"\nhere = true\n', "m.toml")
    assert [machine.name for machine in fleet.machines] == ["desk", "rack-1", "rack-2", "rack-3"]
    assert (fleet.here.name, fleet.here.kind, fleet.here.memory_bytes) == ("rack-1", "cpu", 24 * 10**9)
    assert "rtt_s" in fleet.assumed[0]
    assert [machine.name for machine in fleet.first(2).machines] == ["rack-1", "desk"]


def test_links_replace_what_the_machines_say() -> None:
    given = '[[link]]\nfrom = "desk"\nto = "attic"\nrtt_s = 0.004\nup_bytes_per_s = "5MB"\ndown_bytes_per_s = "9MB"\n'
    attic = with_links(two(), given, "l.toml").machines[1]
    assert (attic.rtt_s, attic.up_bytes_per_s, attic.down_bytes_per_s) == (0.004, 9e6, 5e6)
    turned = with_links(two(), given.replace("from", "x").replace("to =", "from =").replace("x =", "to ="), "l.toml")
    assert (turned.machines[1].up_bytes_per_s, turned.machines[1].down_bytes_per_s) == (5e6, 9e6)


def test_a_link_between_two_others_replaces_their_distance() -> None:
    fleet = read_machines(TWO + DESK.replace("desk", "cellar"), "m.toml")
    assert fleet.link_s("attic", "cellar") == 0.05
    near = with_links(fleet, '[[link]]\nfrom = "attic"\nto = "cellar"\nrtt_s = 0.001', "l.toml")
    assert (near.link_s("attic", "cellar"), near.link_s("", "attic"), near.link_s("", "desk")) == (0.0005, 0.01, 0.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "m.toml lists no machine"),
        ("machine = 3", "m.toml lists no machine"),
        ("[[machine", "m.toml is not valid TOML"),
        ("[[machine]]\nflops_per_s = 1", "machine 1 has no name"),
        (DESK.replace('memory_bytes = "24GB"', ""), "'desk' has no memory_bytes"),
        (DESK.replace("flops_per_s = 71e12", ""), "'desk' has no flops_per_s"),
        (DESK.replace('reading_bytes_per_s = "900GB"', ""), "'desk' has no reading_bytes_per_s"),
        (DESK.replace("71e12", "0"), "'desk': flops_per_s is 0"),
        (DESK.replace("71e12", "-1"), "'desk': flops_per_s is -1, expected 0 to 1e18"),
        (DESK.replace("71e12", "1.1e18"), "'desk': flops_per_s is 1.1e+18"),
        (DESK.replace("71e12", "nan"), "'desk': flops_per_s is nan"),
        (DESK.replace("71e12", "inf"), "'desk': flops_per_s is inf"),
        (DESK.replace("71e12", "true"), "'desk': flops_per_s is not a number"),
        (DESK.replace("71e12", '"fast"'), "'desk': flops_per_s is not a number"),
        (DESK.replace('"24GB"', '"much"'), "'desk': memory_bytes: 'much' is not a size"),
        (DESK.replace('"24GB"', "9" * 400), "expected 0 to 1e18"),
        (DESK.replace('"24GB"', "0.5"), "'desk': memory_bytes is 0"),
        (DESK + "up_bytes_per_s = 0", "'desk': up_bytes_per_s is 0"),
        (DESK + "block_floor_s = -0.1", "'desk': block_floor_s is -0.1"),
        (DESK + "busy = 1.5", "'desk': busy is 1.5"),
        (DESK + "count = 0", "'desk': count is 0"),
        (DESK + "count = 5000", "'desk': count is 5000"),
        (DESK + "count = true", "'desk': count is True"),
        (DESK + 'kind = "tpu"', "'desk': kind is 'tpu'"),
        (DESK + "colour = 3", "'desk' has an unknown field 'colour'"),
        (DESK + "island = 3", "'desk': island is not a text"),
        (DESK + DESK, "two machines have the same name"),
    ],
)
def test_bad_machines(text: str, said: str) -> None:
    with pytest.raises(PlanError) as refused:
        read_machines(text, "m.toml")
    assert said in str(refused.value)
    assert "m.toml" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "lists no link"),
        ('[[link]]\nfrom = "desk"\nto = "moon"\nrtt_s = 1', "link 1 leads to 'moon', which is not one of the machines"),
        ('[[link]]\nfrom = "desk"\nrtt_s = 1', "link 1 leads to 'None'"),
        ('[[link]]\nfrom = ["desk"]\nto = "attic"\nrtt_s = 1', "which is not one of the machines"),
        ('[[link]]\nfrom = "desk"\nto = "attic"', "link 1 has no rtt_s"),
        ('[[link]]\nfrom = "desk"\nto = "attic"\nrtt_s = -1', "rtt_s is -1"),
        ('[[link]]\nfrom = "desk"\nto = "attic"\nrtt_s = 1\nup_bytes_per_s = -1', "up_bytes_per_s is -1"),
        ('[[link]]\nfrom = "desk"\nto = "desk"\nrtt_s = 1', "link 1 leads from 'desk' to itself"),
    ],
)
def test_bad_links(text: str, said: str) -> None:
    with pytest.raises(PlanError) as refused:
        with_links(two(), text, "l.toml")
    assert said in str(refused.value)
