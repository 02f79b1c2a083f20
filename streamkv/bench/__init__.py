"""`streamkv bench`: what this machine does with this engine, measured from inside the process.

Every benchmark alternates between what it compares, prints medians as a table for people, and one
JSON document as its last line. For servers, black box, see `loadtest/`.
"""
