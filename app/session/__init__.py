"""The session protocol between an asker and its hops, as both sides need it.

`wire` is the format of the frames, `outbound` the bounded queues to peers. What a frame does is decided by its
receiver: `app.serving` at a hop, `app.asker` at the asker.
"""
