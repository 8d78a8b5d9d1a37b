"""The simulator: swarms of many unlike nodes through hours of churn, and a judge of how well they place themselves.

Two fidelities share one world (`world`) and one judge (`judge`). `twin` runs the real membership and hosting on the
in-memory network; only loading weights is simulated. `model` calls the same pure decisions (`app.hosting.placement`,
`app.routing.search`), but how news spreads is drawn at random instead of being sent, so that hours pass in seconds.
"""
