"""The network: a libp2p node, its channels, streams and directory services. Knows no tensors and no application."""
