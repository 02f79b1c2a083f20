"""KV memory: blocks on the device, slots in host memory and records on disk, by token prefix.

`manager.KVManager` is the door. Besides it, the rest of the core sees `types` and PrefixNodes.
"""
