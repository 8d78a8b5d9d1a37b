"""A hop: sessions of others are run through this node's blocks, in batches."""
