"""Training a model together, in islands: `shoal train`.

Adapters are trained in `app.training`.

An island makes many steps alone; in rounds, all islands merge what they have learned.

Pure: `record` is the job, `log` the signed rounds that can be replayed, `statements` what islands say of a round under
way, `reading` which sequences an island reads, `decisions` who leads, who is waited for and who is left out, `grid` who
merges with whom, `testers` who tests whose change, and `traces` what is kept of steps for testers. `wire` is the format
of requests, `exchange` moves the shares of a round, `checkpoint` writes the state after it, `testing` tests a change,
`moments` gives a newcomer those of another island, `steps` makes an island's steps between rounds, on this machine or
through several (`machines`), `island` runs one island's part in a job, and `train_jobs` founds, joins and ends jobs on
a node. Steps, codecs and merging are computed by `engine`.
"""
