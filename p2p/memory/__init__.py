"""The in-memory twin of the network, for tests and simulations."""
