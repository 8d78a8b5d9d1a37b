"""Where Shoal keeps its files, and which settings it has."""
