"""The transformer: blocks, attention, caches, embedding and head."""
