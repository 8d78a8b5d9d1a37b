"""Ways into a swarm: creating one, invitations, names, swarms nearby."""
