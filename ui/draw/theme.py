"""The themes, and the colours that style words have in them.

Gold marks this node, amber a weakness, red only missing blocks and failures; the plot and heat colours get stronger
with the value. `shoal-contrast` uses few, clearly different colours instead of shades.
"""

from __future__ import annotations

from functools import lru_cache

from rich.style import Style
from textual.theme import Theme

_NIGHT = {
    "dim": "#7c8ea3",
    "mine": "#f0c65a",
    "minebg": "#2c2a1f",
    "trackbg": "#17222f",
    "trackfg": "#33455a",
    "line": "#2a3c54",
    "plot1": "#2b6d84",
    "plot2": "#3a8ba4",
    "plot3": "#55adc6",
    "plot4": "#86d3e6",
    "heat2": "#3d8ba6",
    "heat3": "#6cc3da",
    "cursor": "#20364a",
}
_DAY = {
    "dim": "#667786",
    "mine": "#9a6400",
    "minebg": "#f5e9cc",
    "trackbg": "#e6edf3",
    "trackfg": "#b9c8d5",
    "line": "#c3d0dc",
    "plot1": "#9cc9d8",
    "plot2": "#6fb0c4",
    "plot3": "#4296af",
    "plot4": "#1c7590",
    "heat2": "#5aa5bb",
    "heat3": "#17718a",
    "cursor": "#d5e4ee",
}
_CONTRAST = {
    "dim": "#d0d0d0",
    "mine": "#ffe000",
    "minebg": "#3a3300",
    "trackbg": "#202020",
    "trackfg": "#808080",
    "line": "#b0b0b0",
    "plot1": "#00d7ff",
    "plot2": "#00d7ff",
    "plot3": "#00d7ff",
    "plot4": "#ffffff",
    "heat2": "#00d7ff",
    "heat3": "#ffffff",
    "cursor": "#404040",
}


def _variables(own: dict[str, str], panel: str) -> dict[str, str]:
    """The theme's own colours, and the variables of Textual widgets that would not follow them otherwise."""
    return {
        **own,
        "footer-background": panel,
        "footer-item-background": panel,
        "footer-key-foreground": own["mine"],
        "footer-description-foreground": own["dim"],
        "block-cursor-background": own["cursor"],
        "block-cursor-text-style": "none",
        "block-cursor-blurred-background": own["trackbg"],
        "border": own["mine"],
        "border-blurred": own["line"],
        "input-selection-background": own["cursor"],
    }


NIGHT = Theme(
    name="shoal-night",
    dark=True,
    primary="#5fb8cf",
    secondary="#8fa9cb",
    accent="#f0c65a",
    foreground="#c8d4df",
    background="#0e1621",
    surface="#0e1621",
    panel="#16202e",
    success="#84c98b",
    warning="#eda25f",
    error="#ee6d76",
    variables={**_variables(_NIGHT, "#16202e"), "block-cursor-foreground": "#e6eef5"},
)
DAY = Theme(
    name="shoal-day",
    dark=False,
    primary="#1f7a94",
    secondary="#3f5d83",
    accent="#9a6400",
    foreground="#24323f",
    background="#f7f9fb",
    surface="#f7f9fb",
    panel="#e9eff4",
    success="#2e8540",
    warning="#b85c00",
    error="#c0303a",
    variables={**_variables(_DAY, "#e9eff4"), "block-cursor-foreground": "#101820"},
)
CONTRAST = Theme(
    name="shoal-contrast",
    dark=True,
    primary="#00d7ff",
    secondary="#ffffff",
    accent="#ffe000",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#000000",
    success="#00ff5f",
    warning="#ffaf00",
    error="#ff5f5f",
    variables={**_variables(_CONTRAST, "#000000"), "block-cursor-foreground": "#ffffff"},
)
THEMES = (NIGHT, DAY, CONTRAST)
_BY_NAME = {theme.name: theme for theme in THEMES}
_BASE = ("primary", "secondary", "accent", "foreground", "background", "panel", "success", "warning", "error")


def colours(theme_name: str) -> dict[str, str]:
    """Colours of a theme by style word; any theme that is not ours gets the colours of `NIGHT`."""
    theme = _BY_NAME.get(theme_name, NIGHT)
    base = {name: str(getattr(theme, name)) for name in _BASE}
    return {**base, **{name: value for name, value in theme.variables.items() if value.startswith("#")}}


@lru_cache(maxsize=1024)
def style_of(theme_name: str, words: str) -> Style:
    """The Rich style of words such as `b mine on minebg`: b bold, i italic, s strikethrough, then colours."""
    known = colours(theme_name)
    front, _, back = words.partition(" on ")
    if words.startswith("on "):
        front, back = "", words[3:]
    parts = front.split()
    colour = next((known[part] for part in parts if part in known), None)
    return Style(
        color=colour,
        bgcolor=known[back] if back else None,
        bold=True if "b" in parts else None,
        italic=True if "i" in parts else None,
        strike=True if "s" in parts else None,
    )
