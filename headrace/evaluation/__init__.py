"""What a change costs in quality: perplexity, divergence from a reference, BLEU and ROUGE."""
