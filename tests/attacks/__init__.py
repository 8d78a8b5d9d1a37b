"""One test for each known way to harm a node, a swarm or a reply; each asserts what must hold instead."""
