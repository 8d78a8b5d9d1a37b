"""An in-memory network with the interface of `p2p.network`, for tests and simulations.

It models delay, bandwidth, loss, partitions, crashes and frozen processes, and a directory with a DHT's weaknesses.
It runs no codec and no cryptography, and of `p2p.host` it uses only the rule for closing surplus links.
"""
