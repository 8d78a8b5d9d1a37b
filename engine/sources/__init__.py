"""Model files: Hugging Face folders, GGUF files, built-in models, downloads.

A source is an index: which tensors each part (block, embedding, head) has, of which type and shape, and where their
bytes are. Bytes are read only when a part is loaded, so the tensors of blocks that are not hosted are never touched.
Running the weights is left to `engine.model`, tokenizing to `engine.text`, and fetching parts from peers to
`app.weights`.
"""
