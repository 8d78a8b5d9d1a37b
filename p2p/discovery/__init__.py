"""Finding peers: multicast DNS, and peers known from before."""
