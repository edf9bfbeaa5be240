"""embeddings/kernels."""
