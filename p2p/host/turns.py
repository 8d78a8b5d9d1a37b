"""Turns at this node's loop: peers at one address together have a share of its time, and wait for each other.

What peers send is read by one thread, which does nothing else meanwhile. Limits on what each connection or identity may
send do not bound that, since one machine has many. `p2p.host.admission` counts the time; protocols whose messages take
long to read or answer call `Connection.in_turn` for each. Whatever else the peer sends waits in its stream.

Time is what the processor worked: while other programs have it, nothing is held against the peers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import trio

from p2p.addresses import IPAddress
from p2p.host.admission import Admission, source_of

T = TypeVar("T")


class Turns:
    """The turns of all peers of a node."""

    def __init__(self, admission: Admission, clock: Callable[[], float] = time.thread_time) -> None:
        self._admission = admission
        self._clock = clock
        self._queues: WeakValueDictionary[IPAddress, trio.Lock] = WeakValueDictionary()

    async def wait(self, ip: IPAddress) -> None:
        """Wait until it is the caller's turn among those at `ip`, and their share has paid for what was done so far.

        Of each address one call returns in a pass of the scheduler, in the order in which they began.
        """
        async with self._queues.setdefault(source_of(ip), trio.Lock()):
            delay_s = self._admission.work_delay_s(ip, trio.current_time())
            if delay_s:
                await trio.sleep(delay_s)

    @coroutine
    def measured(self, ip: IPAddress, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Run `work` and count its time as that of peers at `ip`, without the time for which it waits."""
        resume, value = work.send, None
        while True:
            begin = self._clock()
            try:
                wanted = resume(value)
            except StopIteration as end:
                return cast(T, end.value)
            finally:
                self._admission.work_delay_s(ip, trio.current_time(), self._clock() - begin)
            try:
                resume, value = work.send, (yield wanted)
            except BaseException as error:
                resume, value = work.throw, error
