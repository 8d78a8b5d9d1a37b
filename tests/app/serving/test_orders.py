"""Orders that wait for the end of a step: in turns among askers, in order for each of them, and bounded."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from app.serving.orders import MAX_ORDERS, Order, OrderQueue


def named(done: list[str], name: str) -> Order:
    async def order() -> None:
        done.append(name)

    return order


async def test_askers_take_turns_and_each_ones_orders_keep_their_order() -> None:
    orders, done = OrderQueue(), list[str]()
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        orders.put(name[0], name[0], named(done, name))
    assert len(orders) == 6
    await orders.take()()
    orders.put("d", "d", named(done, "d1"))
    while orders:
        await orders.take()()
    assert done == ["a1", "b1", "c1", "d1", "a2", "b2", "a3"]


async def test_homes_take_turns_and_so_do_the_askers_of_each() -> None:
    orders, done = OrderQueue(), list[str]()
    for name in ("a1", "a2", "b1", "c1", "c2", "d1", "d2"):
        orders.put(name[0], "home" if name[0] in "abc" else "another", named(done, name))
    while orders:
        await orders.take()()
    assert done == ["a1", "d1", "b1", "d2", "c1", "a2", "c2"]


async def test_an_asker_whose_home_changes_keeps_the_order_of_its_orders() -> None:
    orders, done = OrderQueue(), list[str]()
    for number, home in enumerate(("relay", "address", "address")):
        orders.put("a", home, named(done, str(number)))
    while orders:
        await orders.take()()
    assert done == ["0", "1", "2"]


async def test_who_has_many_orders_waiting_waits_for_room(autojump_clock: MockClock) -> None:
    orders, went_on = OrderQueue(), list[str]()

    async def wait(asker: str) -> None:
        await orders.wait_for_room(asker)
        went_on.append(asker)

    for _ in range(MAX_ORDERS + 1):
        orders.put("many", "home", named([], ""))
    orders.put("few", "another", named([], ""))
    async with trio.open_nursery() as nursery:
        for asker in ("many", "few", "none"):
            nursery.start_soon(wait, asker)
        await trio.sleep(1)
        assert sorted(went_on) == ["few", "none"]
        orders.take()
        orders.take()  # of "few"
        await trio.sleep(1)
        assert "many" not in went_on, f"{MAX_ORDERS} still wait"
        orders.take()
    assert "many" in went_on


async def test_nobody_is_left_waiting_when_the_last_order_is_taken(autojump_clock: MockClock) -> None:
    orders = OrderQueue()
    for _ in range(MAX_ORDERS):
        orders.put("asker", "home", named([], ""))
    with trio.fail_after(1):
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(orders.wait_for_room, "asker")
            await trio.sleep(0.1)
            while orders:
                orders.take()
