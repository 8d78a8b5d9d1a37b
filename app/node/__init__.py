"""The node process: owns the network, the active swarm, hosting and the API."""
