"""GPUs: CUDA through NVIDIA's Python bindings, pools of pinned and device memory, and what exchanges tensors there."""
