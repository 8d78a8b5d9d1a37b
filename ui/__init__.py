"""The dashboard: a Textual client of the control API."""
