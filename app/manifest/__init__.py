"""A model's signed description: its shape, its parts and their hashes."""
