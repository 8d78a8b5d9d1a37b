"""Which blocks this node hosts, and getting them loaded."""
