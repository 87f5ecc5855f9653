"""Routing, roles and migration over many replicas: pure decisions on snapshots. Nothing yet; see the docs."""
