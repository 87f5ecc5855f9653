"""Where tokens lie: pools, block tables and the prefix tree. Bookkeeping only; it returns copy actions."""
