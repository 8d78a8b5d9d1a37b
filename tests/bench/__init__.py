"""Programs that measure Shoal beside its rivals in one run and print ratios as JSON."""
