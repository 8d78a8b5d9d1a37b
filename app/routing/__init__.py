"""Chooses the peers that run a reply's blocks.

Knows the cost of hops, measured speeds and links, trust, temporary bans, and the search for the cheapest route, at the
start and while a session runs. What members announce comes from `app.membership`; sessions over a route are run by
`app.asker`, which also audits peers and reports the outcome to the trust book.
"""
