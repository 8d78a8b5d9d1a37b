"""The settings of a running node, from file, environment and flags, applied again whenever they change."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

from app.config.file import Config, load_config, set_value, unset
from app.config.settings import Value
from app.core.errors import AppError

log = logging.getLogger("shoal.node")


class LiveSettings:
    """Holds the settings in use; `follow` applies a changed configuration, `note` records an event for the user."""

    def __init__(
        self, path: Path, config: Config, follow: Callable[[Config], Awaitable[None]], note: Callable[[str, str], None]
    ) -> None:
        self._path, self.current, self._follow, self._note = path, config, follow, note
        self._flags = {
            name: getattr(config.settings, name) for name in config.origins if config.origins[name] == "flag"
        }

    async def change(self, name: str, text: str | None) -> Value:
        """Write one setting to the file and apply it; `text` None resets it. Raises `ConfigError` or `UsageError`."""
        edit = partial(unset, self._path, name) if text is None else partial(set_value, self._path, name, text)
        value: Value = await trio.to_thread.run_sync(edit)
        await self._apply(load_config(self._path, os.environ))
        self._note("setting", f"the setting {name} was changed")
        return value

    async def reload(self) -> None:
        """Read the file again after the user edited it; if it is invalid, report that and keep the old settings."""
        try:
            config = await trio.to_thread.run_sync(load_config, self._path, os.environ)
        except AppError as error:
            log.warning("the old settings stay in use: %s", error)
            self._note("problem", f"the old settings stay in use: {error}")
            return
        if config.with_flags(self._flags) != self.current:
            await self._apply(config)
            self._note("setting", "the configuration file was changed")

    async def _apply(self, config: Config) -> None:
        self.current = config.with_flags(self._flags)
        await self._follow(self.current)
