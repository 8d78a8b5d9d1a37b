"""Fine-tuning jobs.

`engine.training` computes passes, gradients and steps. This package decides which micro-batches run where, when a step
counts, and who may ask for it. `wire` is the format of the frames, `ledger` the state of a job at a hop and `progress`
that of a step at its owner (both pure), `hop` serves the jobs of others, `trainer` runs one's own, `states` moves
adapters and moments between peers.
"""
