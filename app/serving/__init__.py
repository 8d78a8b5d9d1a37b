"""A hop: sessions of others are run through this node's blocks, in batches.

`block_server` has the step loop (queue, batch, run, send); `hop_session` decides what each frame means for its session;
`batching` which tokens a step takes; `admission` who gets a session; `adapters` loads the adapters of sessions, which
`shares` divides among homes. Which blocks are loaded is decided in `app.hosting`; torch is left to `engine`, behind
`app.core.compute.BlockRunner`.
"""
