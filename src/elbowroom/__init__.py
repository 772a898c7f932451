"""elbowroom: fit the training of large diffusion transformers into the memory you have."""
