"""Drafts that one step verifies: what is proposed, and how much of it. Nothing here can change a reply."""
