"""The machine around a node: doctor, background service, logs, uninstalling."""
