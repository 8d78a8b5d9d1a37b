"""The side that asks: prompts in, tokens out, over the hops of a route; recovery and audits."""
