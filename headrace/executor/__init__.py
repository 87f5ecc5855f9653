"""What does: turns plans into arrays, keeps the cache's bytes, samples."""
