"""Fine-tuning jobs: `shoal finetune`.

Whole models are trained in `app.rounds`.

On this machine: `dataset` reads the data, `record` and `job_store` keep jobs, `adapter_store` finished adapters, and
`local_job` trains in this process. Through several nodes: `wire` is the format of the frames, `ledger` the state of a
job at a hop and `progress` that of a step at its owner (both pure), `hop` serves the jobs of others, `trainer` runs
one's own, `states` moves adapters and moments between peers, and `consent` says whose jobs run where. Passes, gradients
and steps are computed by `engine.training`.
"""
