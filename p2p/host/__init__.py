"""The libp2p host: listening, dialling, connections, and who may connect."""
