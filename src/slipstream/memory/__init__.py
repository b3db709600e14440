"""Less memory for activations: computed again in backward instead of kept. Exactness: bitwise."""
