"""Fine-tuning by low-rank adapters (LoRA): passes, gradients, optimiser, and PEFT's files.

Knows tensors and blocks, no peers, no files of the application and no text: `app.training` decides which micro-batches
are run where and when a step counts. The weights of the model itself are only read.
"""
