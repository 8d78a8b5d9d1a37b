"""Reachability behind NATs: port mapping, dial-back probes, relays, hole punching.

`traversal` combines them: the outcome of the probes decides whether a node relays for others or uses relays itself. The
connections and their handshakes belong to `p2p.host`; the probe's calls are sent by `p2p.network`.
"""
