"""State of the dashboard: the node's latest snapshot, conversations, the reply being read.

It reads from the node through `app.api.client` and knows neither widgets nor colours: `ui.draw` formats this state,
`ui.screens` and `ui.widgets` show it.
"""
