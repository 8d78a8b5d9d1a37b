"""Text in, text out: tokenizer, chat templates, sampling."""
