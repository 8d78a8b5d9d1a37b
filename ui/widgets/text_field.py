"""Text fields that handle their keys in the order of typing."""

from __future__ import annotations

from textual import events
from textual.widget import Widget
from textual.widgets import Input


async def run_own_key(field: Widget, event: events.Key) -> None:
    """Run the action that a field binds to a key at once.

    Textual runs it only after the key has bubbled up to the app. Of keys that arrive together, as over a slow
    connection, a character would then be inserted before a backspace that was typed earlier.
    """
    for binding in field._bindings.key_to_bindings.get(event.key, ()):
        if not binding.priority and await field.app.run_action(binding.action, field):
            event.stop()
            event.prevent_default()
            return


class TextField(Input):
    """A line of text; of a pasted text all lines are taken, joined by spaces."""

    def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        self.replace(" ".join(event.text.splitlines()), *self.selection)

    async def _on_key(self, event: events.Key) -> None:
        await run_own_key(self, event)
