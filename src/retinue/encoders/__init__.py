"""Ready-made backends; ``hf`` serves the vision half of a Hugging Face model that ``retinue split`` cut."""
