"""How weights are stored: the block formats and their exact decoding."""
