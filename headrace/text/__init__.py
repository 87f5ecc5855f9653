"""Text in and out: tokenizers, incremental detokenisation, stop strings, chat templates."""
