"""Persisted records: cost tables, calibrations, admission evidence.

fingerprint  what a measurement depends on
schema       versioned records, and their translation to planning's types
store        atomic files and the cache folder
freshness    from options and files to: scheduling on or off, and why
"""
