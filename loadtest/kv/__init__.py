"""What a server does with its KV memory, measured from outside: waste, prefixes, chats, forks,
overload, restarts. Each scenario is one file, one table, and ratios within one run."""
