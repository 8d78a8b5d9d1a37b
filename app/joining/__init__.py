"""Ways into a swarm: creating one, invites, names, swarms of linked peers.

It turns a user's wish into an `app.swarm.saved.SavedSwarm`, builds the network's configuration from the settings, and
estimates what each swarm would offer this machine. Taking part in the swarm afterwards is done by `app.membership` and
`app.node`; the formats of records and invites are in `app.swarm`.
"""
