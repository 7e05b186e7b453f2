"""Verification of drafted tokens: ragged rejection sampling and its outcome record."""
