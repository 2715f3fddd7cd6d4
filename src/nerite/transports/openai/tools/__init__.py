"""How models write calls of tools: a parser for each family, fed with text as it comes."""
