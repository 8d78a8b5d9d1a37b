"""The bytes of models: where they are here, and their exchange with peers in checked chunks.

Peers exchange the parts of a `PartSet` (`part_set`). `Library` (`library`) is the set of a model's parts, which lie in
one of two places: the cache folder (`part_store`) or the model's own files, which are indexed and never copied
(`source_index`). `download` fetches missing parts, `chunk_server` serves them, `disk_space` evicts unused ones, and
`model_weights` runs all of this for one swarm's model. Part hashes and the manifest format are in `app.manifest`; which
blocks to host is decided in `app.hosting`; who is a member, in `app.membership`.
"""
