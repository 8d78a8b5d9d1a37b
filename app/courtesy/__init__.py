"""Hosting pauses while the machine's owner needs the machine.

`rules` decides, purely, from readings and settings; `sensors`, `idle` and `full_screen` read the machine; `watch` runs
the rules and asks the node to pause and resume; `pause` holds the pause in force, by hand or by rule. Draining sessions
and unloading blocks is done by `app.node`, the settings and timetables are in `app.config`.
"""
