"""What the `streamkv` command does, a file a command: `name(engine_config, options) -> exit code`.

cli.py parses, calls one of these, and says its errors. A command imports what is heavy when it is
called.
"""
