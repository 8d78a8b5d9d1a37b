"""Reads tensors from files straight into a GPU's memory: threads read into pinned buffers, the GPU copies from there.

A single thread that reads into ordinary memory and copies from there loads 1 GB/s; four threads fill what the bus
carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from engine.errors import SourceError
from engine.sources.base import TensorEntry
from engine.sources.files import AGAIN, unreadable

READERS = 4
CHUNK_BYTES = 16 << 20


class DeviceReader:
    """Threads, pinned buffers and streams for reading onto one CUDA device; close it after use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(READERS, "shoal reader")
        self._lanes: SimpleQueue[tuple[Tensor, Any]] = SimpleQueue()
        for _ in range(READERS):
            self._lanes.put((torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Stream(device)))

    def read(self, wanted: Sequence[tuple[TensorEntry, Tensor]]) -> None:
        """Fill the bytes (uint8, on the device) of these tensors; returns when they are there.

        Raises `SourceError` if a file cannot be read or is too short.
        """
        allocated = torch.cuda.current_stream(self._device).record_event()
        jobs = [
            self._threads.submit(self._copy, entry, start, raw[start : start + CHUNK_BYTES], allocated)
            for entry, raw in wanted
            for start in range(0, entry.length, CHUNK_BYTES)
        ]
        try:
            for job in jobs:
                job.result()
        finally:
            for job in jobs:
                job.cancel()

    def close(self) -> None:
        """End the threads and free the buffers."""
        self._threads.shutdown(cancel_futures=True)

    def _copy(self, entry: TensorEntry, start: int, out: Tensor, allocated: Any) -> None:
        buffer, stream = lane = self._lanes.get()
        try:
            read_range(entry, start, buffer[: out.numel()])
            stream.wait_event(allocated)
            with torch.cuda.stream(stream):
                out.copy_(buffer[: out.numel()], non_blocking=True)
            stream.synchronize()
        finally:
            self._lanes.put(lane)


def read_range(entry: TensorEntry, start: int, out: Tensor) -> None:
    """Fill `out` (uint8, on the CPU) with a tensor's bytes from `start` on; raises `SourceError`."""
    if not out.numel():
        return
    array: Any = out.numpy()
    buffer = memoryview(array).cast("B")
    done = 0
    for extent in entry.extents:
        skipped = min(start, extent.length)
        start -= skipped
        whole = done + min(extent.length - skipped, len(buffer) - done)
        if done == whole:
            continue
        try:
            with extent.file.open("rb", buffering=0) as file:
                file.seek(extent.offset + skipped)
                while done < whole:  # one read may return less than requested (at most 2 GiB on Linux)
                    count = file.readinto(buffer[done:whole])
                    if not count:
                        raise SourceError(f"{extent.file} is cut short: tensor {entry.name} is incomplete: {AGAIN}")
                    done += count
        except OSError as error:
            raise unreadable(extent.file, error) from error
