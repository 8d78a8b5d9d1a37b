"""The session protocol between an asker and its hops, as both sides need it."""
