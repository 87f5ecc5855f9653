"""What runs a program. Every backend is handed the same inputs and tested against the reference."""
