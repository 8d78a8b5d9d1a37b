"""The state of a node as its user sees it, as the API sends it.

Knows the values (`views`), their JSON form (`codec`) and the list of startup steps (`startup`). `app.node` fills them
in, `app.api` serves them, `app.cli` and `ui` show them.
"""
