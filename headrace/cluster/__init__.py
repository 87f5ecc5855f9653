"""Routing, roles and migration over many replicas: pure decisions on snapshots. Nothing yet; the plan is in the docs."""
