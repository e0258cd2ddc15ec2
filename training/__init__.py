"""How the embedded models were made: data, recipe, evaluation. Run ``python -m training``."""
