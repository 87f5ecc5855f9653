"""What a reply means: tool calls and reasoning, told apart from text while it is being made."""
