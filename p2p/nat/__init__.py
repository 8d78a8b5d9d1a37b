"""Reachability behind NATs: relays and hole punching."""
