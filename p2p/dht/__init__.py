"""Kademlia among Shoal nodes: provider records and small values, kept by the nodes nearest to the key.

It holds the routing table, the iterative look-up, the stores and the message format. Messages travel as calls of method
`kad`, which `p2p.network` sends and serves; connections and addresses belong to `p2p.host`. Keys and values are opaque
bytes here: the caller passes in the check of a value's validity.
"""
