"""A node's home folder and its settings.

`home` knows every file that Shoal keeps in a home folder, the API token and the running node; `settings` declares each
setting, `file` reads and edits `config.toml`, `live` applies changes to a running node, and `timetable` parses times of
the week. The contents of the other files belong to the rooms that write them.
"""
