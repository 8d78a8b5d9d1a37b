"""Where models come from: a Hugging Face folder, a GGUF file, the starter model, a tiny random one.

A source is an *index*: which tensors each part (block, embedding, head) has, of which type and shape, and where
their bytes lie. Bytes are read when a part is loaded and not before, so the tensors of blocks that are not hosted
are never touched.
"""
