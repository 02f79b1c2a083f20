"""Names of the files that a tokenizer is read from. Imports nothing: what only downloads reads it
too."""

# The library reads the first; each of the others converts to it.
TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "tekken.json"),
)
