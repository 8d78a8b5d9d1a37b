"""The model manifest: shape, parts and hashes of a model; its hash names the model.

`manifest` defines and validates the document, `model_shape` the encoding of `ModelConfig` in it, `merkle` the hashes of
a part's chunks, and `importing` makes a manifest from model files. Where parts are stored and how they are downloaded
is in `app.weights`; which model a swarm serves, in `app.swarm`.
"""
