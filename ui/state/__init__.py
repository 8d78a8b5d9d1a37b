"""What the dashboard knows: the followed snapshot, conversations, replies under way."""
