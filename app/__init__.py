"""The application: swarms, placement, routing, sessions, the control API and the command line."""
