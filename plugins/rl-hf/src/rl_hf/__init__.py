"""The Hugging Face backend: policy and generation on transformers."""
