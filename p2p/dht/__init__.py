"""libp2p's Kademlia: provider records and small values; and its public directory.

It holds the routing table, the iterative look-up, the stores, the message format and the streams that carry messages;
connections and addresses belong to `p2p.host`. Keys and values are opaque bytes here: the caller passes in the check of
a value's validity. `public_directory` is a client of the directory that other libp2p programs run.
"""
