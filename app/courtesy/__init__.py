"""Courtesy: the machine's owner comes first. Sensors look, rules decide, a watch pauses and resumes the hosting.

`rules` and `schedule` are pure; `sensors` and `idle` ask the system; `watch` joins them and speaks with the node.
"""
