"""Triton kernels and the backend that launches them; they need CUDA, or the interpreter of Triton."""
