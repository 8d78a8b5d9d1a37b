"""The node process: `node` builds its parts and carries out what the API asks.

This room knows when the network is opened and closed, how a swarm is joined and left, when hosting starts, pauses and
restarts, and how the state is put together for the snapshot. It leaves everything it runs to other rooms: members to
`app.membership`, blocks to `app.hosting` and `app.serving`, replies to `app.asker`, downloads to `app.weights`, pause
rules to `app.courtesy`, and HTTP to `app.api`.
"""
