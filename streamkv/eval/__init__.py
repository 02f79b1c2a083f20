"""`streamkv eval`: how near a model's answers stay to its own in float32, in each way to run it.

Every way computes the same tokens of the same text through the native program, as the server would;
a table says what weights, inputs and keys and values of fewer bits cost.
"""
