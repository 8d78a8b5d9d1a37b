"""The Kademlia directory."""
