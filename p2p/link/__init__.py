"""Shoal's link protocol: calls and message streams between two peers, with priorities and limits.

The wire format is specified in the docstring of `p2p`. `Switchboard` keeps the links to all peers; each `PeerLink` runs
over one byte stream. How byte streams are dialled and secured is left to `p2p.host` and `p2p.channel`, the meaning of
methods and protocols to `app`.
"""
