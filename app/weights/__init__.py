"""The bytes of models: where they are on this machine, and their exchange with peers in checked chunks.

`Library` (`library`) combines the two places a part can be in: the cache folder (`part_store`) and the model's own
files, which are indexed and never copied (`source_index`). `download` fetches missing parts, `chunk_server` serves
them, `disk_space` evicts unused ones, and `model_weights` runs all of this for one swarm's model. Part hashes and the
manifest format are in `app.manifest`; which blocks to host is decided in `app.hosting`; who is a member, in
`app.membership`.
"""
