"""LoRA adapters: variants of a model that share its weights."""
