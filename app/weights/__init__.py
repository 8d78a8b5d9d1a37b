"""The bytes of models: where they lie on this machine, and how they come from and go to peers.

extents     a part's bytes as pieces of files
part_files  whole and half-fetched parts under the cache folder, named by their hash
index       parts that lie in a model's own files, which are never copied
library     both together: which parts of a model are here, and the model as the engine reads it
wire        what peers say to each other about parts
sharing     giving chunks to peers
fetching    getting parts from peers
work        which chunk to ask whom for next
keeping     which fetched parts stay when the disk is full
stock       all of it for one model, for a node that is in its swarm
verifying   reading everything again
"""
