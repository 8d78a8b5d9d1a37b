"""Hosting blocks: which span to take, loading it, and moving when the swarm changes.

`engine.budget` computes how many blocks fit, `placement` decides which, `memory` when to give some back, `loader`
brings blocks onto the devices, `block_host` carries the decisions out, `device_view` shows the devices. This room
leaves sessions to `app.serving`,
announcements to `app.membership`, downloads to `app.weights`, and pauses and restarts to `app.node.hosting_loop`.
"""
