"""The libp2p host: listening, dialling, connections and their streams, admission limits.

`p2p.channel` secures and multiplexes a raw connection; this package decides which connections to accept, make and keep.
Of the protocols on the streams it speaks only `identify`, `ping` and the heartbeat; calls and messages belong to
`p2p.link`, relaying and hole punching to `p2p.nat`, the directory to `p2p.dht`.
"""
