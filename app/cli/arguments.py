"""Types of arguments that several commands share."""

from __future__ import annotations

import argparse

from app.core.units import parse_duration, parse_size


def size_argument(text: str) -> int:
    """A size like 6GB, in bytes."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def duration_argument(text: str) -> float:
    """A time like 2h, in seconds."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
