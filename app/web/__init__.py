"""The dashboard in a browser.

The page draws a terminal, and behind each page is a dashboard process of its own. `server` serves the page and its
WebSocket on loopback, `links` decides who may open one, `screen` runs the process. How a dashboard is started is left
to `app.cli.web`; nothing here knows Textual.

A page opens the WebSocket `/screen` and sends one JSON object: `code` of a one-time link, the `session` that such a
link was exchanged for, or `view` of a read-only link, with `width` and `height` in cells and, for a view, `tab`. The
answer is `{"session": …, "mode": "own" | "view"}`. Then the server sends what a terminal would get, as binary messages
of UTF-8, and the page sends JSON objects: `{"keys": …}`, what a terminal would send, and `{"width": …, "height": …}`. A
view may send only its size; the server closes its socket if it sends anything else, and never passes input on.
"""
