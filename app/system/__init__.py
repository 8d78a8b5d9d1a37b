"""The machine around a node: `shoal doctor`, bug reports, service, logs, uninstalling.

These functions take facts and paths and return lines or results; the commands in `app.cli` print them. `console` is the
terminal on every system, `releases` the signed list of releases. Measuring the network is left to a running node
(`app.node`), the list of files in a home folder to `app.config.home`.
"""
