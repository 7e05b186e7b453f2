"""Compiled inner loops of the simulator (numba); Python reaches them through entry.py."""
