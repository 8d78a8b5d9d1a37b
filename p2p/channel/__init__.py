"""Turns a socket into encrypted, multiplexed streams: multistream-select, Noise, yamux.

All three replace py-libp2p's own, with bounds on everything that a peer sends, and stay compatible with other libp2p
implementations. Dialling, listening and the choice of peers are left to `p2p.host`; the protocol on top of the streams
is `p2p.link`.
"""
