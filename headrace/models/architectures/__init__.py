"""One page per architecture: its config, how files spell it, and the program it stands for."""
