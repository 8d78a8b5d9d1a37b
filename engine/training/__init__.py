"""Training: LoRA adapters and whole weights, their passes, gradients, optimisers and files.

Adapters are `adapters`, `products`, `span`, `local_trainer` and `peft_format`; all weights are `parameters`, `full` and
`export`, and what islands exchange is `codecs` and `outer`. Knows tensors and blocks, no peers, no files of the
application and no text: `app.training` and `app.rounds` decide which micro-batches are run where and when a step
counts. The weights of a served model are only read.
"""
