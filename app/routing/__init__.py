"""Which peers run a reply's blocks: search, cost, estimates, trust, and changing the route later."""
