"""The text side of a model: tokenizer, chat template, sampling, replies.

It turns conversations into token ids, and logits into tokens and text. It does not compute logits (`engine.model` or
the swarm does) and does not read model files (`engine.sources` supplies the tokenizer and the template).
"""
