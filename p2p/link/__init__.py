"""Shoal's protocol over a pair of streams: calls, messages, priorities, quotas."""
