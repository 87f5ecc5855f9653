"""Policies, gates and batching modes against each other on the virtual clock.

python -m benchmarks.policies --traces FOLDER [--only shortest,modes,...] [--write]
"""
