"""The session protocol between an asker and its hops, as both sides need it.

`frame` is the form of a frame, which training shares, `wire` the kinds of frames, `adapter_index` the document that
names an adapter, `outbound` the bounded queues to peers. What a frame does is decided by its receiver: `app.serving` at
a hop, `app.asker` at the asker.
"""
