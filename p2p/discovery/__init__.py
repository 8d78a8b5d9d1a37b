"""Finding peers without the directory: mDNS on the LAN, and peers of earlier runs.

`seeker` keeps dialling the configured, remembered and reported peers until enough are connected. `p2p.host`
dials, `p2p.dht` finds peers by key, and `p2p.network` decides which of these means a node uses.
"""
