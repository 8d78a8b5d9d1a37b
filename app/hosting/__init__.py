"""Hosting blocks: how many fit, which span to take, downloading and loading it, and moving when the swarm changes.

`placement` decides, `loader` brings blocks onto the device, `block_host` carries the decisions out. This room leaves
sessions to `app.serving`, announcements to `app.membership`, downloads to `app.weights`, and pauses and restarts to
`app.node.hosting_loop`.
"""
