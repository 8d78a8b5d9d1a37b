"""Turns a socket into encrypted, multiplexed streams: multistream-select, Noise, yamux.

Other libp2p implementations are understood, and everything that a peer sends is bounded. Dialling, listening and the
choice of peers are left to `p2p.host`; the protocol on top of the streams is `p2p.link`.
"""
