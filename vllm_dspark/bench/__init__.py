"""The benchmark harness: the same work through several ways of serving, in turns.

modes      what is compared, as engine arguments
workload   what is asked of each
worker     one long-lived process per engine; drive.py is its load generator
runner     interleaved cells, appended to a file at once, resumable
statistics medians, cross-fitted best settings, bootstrap intervals
report     rows, JSON, terminal table; plots.py draws them
"""
