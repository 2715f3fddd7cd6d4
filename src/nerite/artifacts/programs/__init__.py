"""Python models that are copied into repositories beside the weights they serve. They import nothing from Nerite."""
