"""Values that every other package of the application knows: errors, spans, the network's and the engine's interface."""
