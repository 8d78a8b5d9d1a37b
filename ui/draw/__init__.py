"""Pure functions from state to rows of text."""
