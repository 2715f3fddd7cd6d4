"""What is done to valid inputs. Pure: equal chance (``random.Random``) and equal input make an equal result."""
