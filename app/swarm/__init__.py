"""A swarm's identity: its record, name, invitation and rendezvous keys, and the swarms saved on disk."""
