"""The state of a node as its user sees it: views that the API sends to command line and dashboard.

Knows the values (`views`), their JSON form (`codec`) and the list of startup steps (`startup`). `app.node` fills them
in, `app.api` serves them, `app.cli` and `ui` show them.
"""
