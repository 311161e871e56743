"""Shared test material: oracle, inputs, metrics, processes. Imports torch only."""
