"""A model zoo of adaptive and knowledge-primed attention."""
