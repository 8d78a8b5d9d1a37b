"""From a socket to encrypted, multiplexed streams: Noise, multistream-select, Yamux."""
