"""The benchmark: workloads, targets they run against, and what came of it. Only `cli` imports this package."""
